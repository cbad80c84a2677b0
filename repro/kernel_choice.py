"""What is known about the guard of the kernel that ``--kernel`` names, and whose launcher goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.image import KernelImage
from ..kernels.plan import DEFAULT_PROFILE

__all__ = ["ChosenKernel", "choose_kernel", "guard_of_release", "require_kernel"]

#: ``progress(what, done_bytes, total_bytes or None)`` while a release is fetched.
Progress = Callable[[str, int, "int | None"], None]


@dataclass(frozen=True, slots=True)
class ChosenKernel:
    """``release``: the vLLM release whose launcher's arithmetic goes with it. ``guarded``: whether the row length is bounded before
    use, None if not known; ``guard_source``: from where that is known. ``note``: where the code is from, one sentence.
    """

    image: KernelImage
    release: str
    guarded: bool | None
    guard_source: str
    note: str = ""


def choose_kernel(
    spec: str, sm: int, top_k: int, vec: int, *, progress: Progress | None = None, interpreted: bool = False
) -> ChosenKernel:
    """``builtin[:VARIANT]``, ``vllm==X``, ``installed`` or a path. ``interpreted``: decoded code alone will do.

    Raises KernelNotFoundError, UsageError, CubinError, DownloadError, ToolMissingError.
    """
    from ..kernels.select import select

    found = select(spec, sm=sm, top_k=top_k, vec=vec, progress=progress, interpreted=interpreted)
    image = found.image
    if spec.partition(":")[0] == "builtin":
        return ChosenKernel(image, DEFAULT_PROFILE, image.guarded, "built so", found.note)
    release, guarded = guard_of_release(found.release)
    if image.guarded is not None:
        return ChosenKernel(image, release or DEFAULT_PROFILE, image.guarded, "read from the code", found.note)
    if release is None:
        return ChosenKernel(image, DEFAULT_PROFILE, None, "no known release: only an audit can tell", found.note)
    return ChosenKernel(image, release, guarded, f"table of releases, vLLM {release}", found.note)


def require_kernel(spec: str, sm: int, *, shape: tuple[int, int] | None = None, progress: Progress | None = None) -> None:
    """Refuse what ``choose_kernel`` would refuse, before anything else is done; nothing is compiled, a release may be fetched.

    ``shape``: (k, vector width) of the instantiation that is needed. Raises KernelNotFoundError, UsageError, CubinError,
    DownloadError.
    """
    if spec.partition(":")[0] == "builtin":
        from ..kernels.build import parse_builtin

        parse_builtin(spec)
        return
    from ..kernels.shipped import shipped_kernels

    found = shipped_kernels(spec, arch=sm, progress=progress)
    if shape is not None:
        found.pick(sm, *shape)


def guard_of_release(text: str | None) -> tuple[str | None, bool | None]:
    """(release, guarded) from the table of releases.

    (None, None) for a nightly, a local build or a fork: those are never judged by the number that they carry.
    """
    from packaging.version import InvalidVersion, Version

    if text is None:
        return None, None
    try:
        version = Version(text)
    except InvalidVersion:
        return None, None
    if version.is_devrelease or version.is_prerelease or version.local is not None:
        return None, None
    from ..kernels.plan import release_profile

    return str(version), release_profile(str(version)).guarded
