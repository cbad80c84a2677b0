"""Python sources of a vLLM release, a wheel or the installed vLLM, for an audit: named members only, and never imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.version import Version

from ..errors import EvidenceError, KernelNotFoundError, UsageError
from .ranged import Progress
from .release_cache import Entry, ReleaseCache
from .releases import fetching, host_machine, installed_vllm, kernel_file_head, looks_like_release, parse_release
from .wheels import MAX_TEXT_BYTES, MAX_TEXTS_BYTES, WheelFile, is_zip, match_names

__all__ = ["release_members"]

MAX_MEMBER_COUNT = 2000


def release_members(
    spec: str, patterns: Sequence[str], *, progress: Progress | None = None, cache: ReleaseCache | None = None
) -> dict[str, bytes]:
    """Text members of a release, a wheel or the installed vLLM whose names match, e.g. ``vllm/**/indexer*.py``: name to bytes.

    At most 2000 members, 8 MiB each, 64 MiB in all; more is an error. Kept in the cache: a second call needs no network. Raises as
    ``shipped_kernels``; KernelNotFoundError for origins that hold no sources (a shared object, a cubin).
    """
    cache = cache or ReleaseCache()
    if spec == "installed":
        _, folder = installed_vllm()
        names = [f"vllm/{path.relative_to(folder).as_posix()}" for path in sorted(folder.rglob("*")) if path.is_file()]
        return _collect(match_names(names, patterns), lambda name: _read_text(folder / name[5:]))
    if looks_like_release(spec):
        return _release_members(parse_release(spec), patterns, progress, cache)
    path = Path(spec).expanduser()
    if not is_zip(kernel_file_head(path)):
        raise KernelNotFoundError(f"{spec} holds no Python sources", help_text="Give a release, a wheel, or installed.")
    with path.open("rb") as stream:
        wheel = WheelFile(stream, path.name)
        return _collect(wheel.matching(patterns), wheel.read)


def _read_text(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    if len(raw) > MAX_TEXT_BYTES:
        raise EvidenceError(f"more than {MAX_TEXT_BYTES >> 20} MiB", path=str(path))
    return raw


def _collect(names: Sequence[str], read: Callable[[str], bytes]) -> dict[str, bytes]:
    if len(names) > MAX_MEMBER_COUNT:
        raise UsageError(f"{len(names)} members match, more than {MAX_MEMBER_COUNT}")
    found: dict[str, bytes] = {}
    total = 0
    for name in names:
        found[name] = read(name)
        total += len(found[name])
        if total > MAX_TEXTS_BYTES:
            raise UsageError(f"the members that match are larger than {MAX_TEXTS_BYTES >> 20} MiB")
    return found


def _release_members(version: Version, patterns: Sequence[str], progress: Progress | None, cache: ReleaseCache) -> dict[str, bytes]:
    origin = f"vllm=={version}"
    machines = list(dict.fromkeys((host_machine(), "x86_64", "aarch64")))
    for machine in machines:
        entry = cache.entries().get(f"{origin}@{machine}")
        kept = _kept_members(entry, patterns, cache) if entry is not None else None
        if kept is not None:
            return kept
    with cache.lock(origin):
        with fetching(origin, version, cache, progress, machines) as (opened, _):
            wheel = opened.wheel
            found = _collect(wheel.matching(patterns), wheel.read)
            key = f"{origin}@{opened.machine}"
            old = cache.entries().get(key)
            base = old or Entry(
                release=str(version),
                machine=opened.machine,
                source=opened.source,
                source_sha256=opened.sha256,
                verified=opened.verified,
            )
            members = {**base.members, **{name: cache.keep(raw) for name, raw in found.items()}}
            cache.put(key, base.model_copy(update={"names": cache.keep(json.dumps(wheel.names).encode()), "members": members}))
        return found


def _kept_members(entry: Entry, patterns: Sequence[str], cache: ReleaseCache) -> dict[str, bytes] | None:
    raw = cache.content(entry.names) if entry.names else None
    if raw is None:
        return None
    found: dict[str, bytes] = {}
    for name in match_names(json.loads(raw), patterns):
        content = cache.content(entry.members.get(name, ""))
        if content is None:
            return None
        found[name] = content
    return found
