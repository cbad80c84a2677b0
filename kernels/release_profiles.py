"""What changed in vLLM's persistent top-k launcher and its caller from release to release, as data.

Source: the source distributions of vLLM 0.20.0, 0.20.1, 0.20.2, 0.21.0 … 0.33.0 (``csrc/topk.cu`` or
``csrc/libtorch_stable/topk.cu``, the sparse attention indexer layer) and vLLM #41189, #41444, #41665, #47164, #51538, #54110.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from ..errors import KernelNotFoundError

__all__ = ["DEFAULT_PROFILE", "ReleaseProfile", "known_profiles", "release_profile"]


@dataclass(frozen=True, slots=True)
class ReleaseProfile:
    """The launcher and the caller of releases ``first`` to ``last``.

    ``headroom``: CTA slots are kept free when the barrier is needed (#41189). ``occupancy_of_vec4``: occupancy is asked for the
    vec-4 instantiation whatever is launched. ``oversubscribed``: what happens when one group needs more CTAs than can be resident:
    ``launch`` (it is launched and hangs), ``refuse`` (RuntimeError where FilteredTopK's 128 KiB of shared memory are not there,
    else FilteredTopK), ``decode`` (top_k_per_row_decode instead of the error). ``sampled``: more than 64
    long rows go to a sampled kernel. ``stride_is_width``: the launcher takes logits.size(1), not stride(0).
    ``caller_max_seq_len``: what the caller passes:
    ``batch`` (the uncompressed maximum, baked as max_model_len into FULL graphs) or ``width`` (logits.shape[1], compressed).
    ``zeroed``: when the row states are zeroed before a launch. ``guarded``: the row length is bounded before use.
    ``clamped``: the producer clamps at 0. ``cooperative``: which GPUs take cooperative_topk instead, for at most so many rows.
    """

    first: str
    last: str
    headroom: bool
    occupancy_of_vec4: bool
    oversubscribed: Literal["launch", "refuse", "decode"]
    sampled: bool
    stride_is_width: bool
    caller_max_seq_len: Literal["batch", "width"]
    zeroed: Literal["never", "radix only", "always"]
    guarded: bool
    clamped: bool
    cooperative: str
    source: str


_PROFILES: tuple[ReleaseProfile, ...] = (
    ReleaseProfile(
        "0.20.0", "0.20.0", headroom=False, occupancy_of_vec4=True, oversubscribed="launch", sampled=False, stride_is_width=True,
        caller_max_seq_len="batch", zeroed="never", guarded=False, clamped=False, cooperative="",
        source="vLLM 0.20.0 csrc/topk.cu",
    ),
    ReleaseProfile(
        "0.20.1", "0.20.1", headroom=True, occupancy_of_vec4=False, oversubscribed="refuse", sampled=False, stride_is_width=True,
        caller_max_seq_len="batch", zeroed="radix only", guarded=False, clamped=False, cooperative="",
        source="vLLM 0.20.1 csrc/topk.cu; #41189, #41444",
    ),
    ReleaseProfile(
        "0.20.2", "0.20.2", headroom=True, occupancy_of_vec4=False, oversubscribed="refuse", sampled=False, stride_is_width=True,
        caller_max_seq_len="batch", zeroed="always", guarded=False, clamped=False, cooperative="",
        source="vLLM 0.20.2 csrc/topk.cu; #41665",
    ),
    ReleaseProfile(
        "0.21.0", "0.23.0", headroom=True, occupancy_of_vec4=False, oversubscribed="refuse", sampled=False, stride_is_width=False,
        caller_max_seq_len="batch", zeroed="always", guarded=False, clamped=False, cooperative="",
        source="vLLM 0.21.0 to 0.23.0 topk.cu",
    ),
    ReleaseProfile(
        "0.24.0", "0.24.0", headroom=True, occupancy_of_vec4=False, oversubscribed="refuse", sampled=False, stride_is_width=False,
        caller_max_seq_len="batch", zeroed="always", guarded=False, clamped=False, cooperative="sm_90 and later, at most 32 rows",
        source="vLLM 0.24.0; #43008",
    ),
    ReleaseProfile(
        "0.25.0", "0.27.1", headroom=True, occupancy_of_vec4=False, oversubscribed="refuse", sampled=False, stride_is_width=False,
        caller_max_seq_len="width", zeroed="always", guarded=False, clamped=False,
        cooperative="sm_90 and later except sm_120 and sm_121, at most 32 rows",
        source="vLLM 0.25.0 to 0.27.1 csrc/libtorch_stable/topk.cu, sparse_attn_indexer.py; #47164",
    ),
    ReleaseProfile(
        "0.28.0", "0.29.0", headroom=True, occupancy_of_vec4=False, oversubscribed="refuse", sampled=False, stride_is_width=False,
        caller_max_seq_len="width", zeroed="always", guarded=True, clamped=True,
        cooperative="sm_90 and later except sm_120 and sm_121, at most 32 rows",
        source="vLLM 0.28.0 and 0.29.0; #51538",
    ),
    ReleaseProfile(
        "0.30.0", "0.30.0", headroom=True, occupancy_of_vec4=False, oversubscribed="decode", sampled=False, stride_is_width=False,
        caller_max_seq_len="width", zeroed="always", guarded=True, clamped=True,
        cooperative="sm_90 and later except sm_120 and sm_121, at most 64 rows",
        source="vLLM 0.30.0 csrc/libtorch_stable/topk.cu, indexer_topk.py; #54110",
    ),
    ReleaseProfile(
        "0.31.0", "0.32.0", headroom=True, occupancy_of_vec4=False, oversubscribed="decode", sampled=True, stride_is_width=False,
        caller_max_seq_len="batch", zeroed="always", guarded=True, clamped=True,
        cooperative="sm_90 and later except sm_120 and sm_121; the row limit was not read in these releases",
        source="vLLM 0.31.0 and 0.32.0 (launcher as in 0.33.0), indexer_topk.py",
    ),
    ReleaseProfile(
        "0.33.0", "0.33.0", headroom=True, occupancy_of_vec4=False, oversubscribed="decode", sampled=True, stride_is_width=False,
        caller_max_seq_len="batch", zeroed="always", guarded=True, clamped=True,
        cooperative="sm_90 and later except sm_120 and sm_121, at most 64 rows",
        source="vLLM 0.33.0 csrc/topk.cu, indexer_topk.py",
    ),
)  # fmt: skip

#: The newest release without guard and clamps: what ``plan_launch`` takes where none is named.
DEFAULT_PROFILE = "0.27.1"


def known_profiles() -> tuple[ReleaseProfile, ...]:
    """All rows of the table, oldest first."""
    return _PROFILES


def release_profile(version: str) -> ReleaseProfile:
    """The row for a release number; a release between two rows, or newer than the last one, takes the row before it.

    KernelNotFoundError for releases before 0.20.0, which have no such kernel, and for what is no release number.
    """
    try:
        wanted = Version(version[:64])
    except InvalidVersion:
        raise KernelNotFoundError(f"{version[:64]!r} is not a release number", help_text="Give one such as 0.27.1.") from None
    found: ReleaseProfile | None = None
    for profile in _PROFILES:
        if Version(profile.first) <= wanted:
            found = profile
    if found is None:
        raise KernelNotFoundError(f"vLLM {wanted} has no persistent top-k: the first release with one is 0.20.0")
    return found
