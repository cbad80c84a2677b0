"""The shipped kernel, whoever has it: a vLLM release by number, the installed one, a wheel, a shared object, a cubin.

From any of them: every cubin that holds a persistent top-k, for every architecture, and each instantiation in it with the metadata
that the cubin declares. Files are hostile; nothing of them is executed or imported here. What was found is kept in the user's
cache by content, so that a second run needs neither the network nor the file's other 300 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ..errors import CubinError, DeadlineError, DownloadError, KernelNotFoundError, OurFaultError
from .cubin import kernel_images
from .elf import is_elf
from .image import KernelImage
from .library_search import KERNEL, FoundCode, binary_compatible, carries_code, search_file, search_library
from .ranged import Progress
from .release_cache import Entry, ReleaseCache
from .release_sources import release_members
from .releases import (
    OpenWheel,
    as_version,
    fetching,
    host_machine,
    installed_vllm,
    kernel_file_head,
    looks_like_release,
    parse_release,
)
from .wheels import WheelFile, is_zip

__all__ = ["Progress", "ShippedKernels", "binary_compatible", "cached_kernels", "release_members", "shipped_kernels"]

#: Libraries of a wheel in which the kernel has been, newest first; others are looked at only in files that are on this machine.
LIKELY_LIBRARIES = ("vllm/_C_stable_libtorch*.so", "vllm/_C.*so", "vllm/_C*.so")


@dataclass(frozen=True)
class ShippedKernels:
    """What one origin holds. ``origin``: as written after ``--kernel``. ``release``: vLLM version, where known.

    ``labels``: every architecture that the origin has the kernel for, also those that were not loaded. ``verified``: how the bytes
    were checked. ``from_cache``: nothing was fetched. ``notes``: what of the origin could not be read, though the kernel was found.
    """

    origin: str
    release: str | None
    machine: str | None
    source: str
    library: str | None
    verified: str
    labels: tuple[str, ...]
    images: tuple[KernelImage, ...]
    arch_specific: frozenset[str] = frozenset()
    from_cache: bool = False
    notes: tuple[str, ...] = ()

    def pick(self, sm: int, top_k: int, vec: int) -> KernelImage:
        """The instantiation for a GPU: of its own architecture, else the newest one that is binary compatible.

        KernelNotFoundError says what there is instead.
        """
        fitting = [image for image in self.images if self._fits(image, sm)]
        if not fitting:
            lost = f"; not read: {'; '.join(self.notes[:3])}"[:600] if self.notes else ""
            have = ", ".join(self.labels) or "none"
            raise KernelNotFoundError(f"{self.origin} has no machine code for sm_{sm}; it has {have}{lost}")
        best = max(image.sm for image in fitting)
        of_best = [image for image in fitting if image.sm == best]
        wanted = [image for image in of_best if image.top_k == top_k and image.vec == vec]
        if not wanted:
            there = ", ".join(sorted({f"<{image.top_k},{image.vec}>" for image in of_best}))
            raise KernelNotFoundError(f"{self.origin} has no instantiation <{top_k},{vec}> for sm_{sm}; it has {there}")
        # A plain cubin before an architecture-specific one of the same number.
        return min(wanted, key=lambda image: image.cubin_sha256 in self.arch_specific)

    def _fits(self, image: KernelImage, sm: int) -> bool:
        return binary_compatible(image.sm, image.cubin_sha256 in self.arch_specific, sm)


def shipped_kernels(
    spec: str, *, arch: int | None = None, progress: Progress | None = None, cache: ReleaseCache | None = None
) -> ShippedKernels:
    """The persistent top-k of ``spec``: ``vllm==0.27.1``, ``installed``, or a path: wheel, shared object, fat binary, cubin.

    ``arch``: load only what runs on this architecture (e.g. 120). Raises KernelNotFoundError (no such release or kernel),
    CubinError (a file that cannot be read), DownloadError, ToolMissingError, UsageError.
    """
    cache = cache or ReleaseCache()
    if spec == "installed":
        return _installed(arch, cache)
    if looks_like_release(spec):
        return _release(parse_release(spec), arch, progress, cache)
    return _file(spec, Path(spec).expanduser(), arch, cache)


def cached_kernels(cache: ReleaseCache | None = None) -> tuple[str, ...]:
    """Releases whose kernel is in the user's cache, as they are written after ``--kernel``, oldest first."""
    found = {
        version
        for key, entry in (cache or ReleaseCache()).entries().items()
        if key.startswith("vllm==") and entry.cubins and (version := as_version(entry.release)) is not None
    }
    return tuple(f"vllm=={version}" for version in sorted(found))


# ---------------------------------------------------------------------------------------------------------------------------------
# From an index entry to images


def _load(origin: str, entry: Entry, arch: int | None, cache: ReleaseCache, from_cache: bool) -> ShippedKernels | None:
    """The images of an entry; None if a cubin that is wanted is not (or no longer) kept."""
    images: list[KernelImage] = []
    specific: set[str] = set()
    for label, digests in entry.cubins.items():
        number = int("".join(filter(str.isdigit, label)) or "0")
        if arch is not None and not binary_compatible(number, label.endswith("a"), arch):
            continue
        for digest in digests:
            raw = cache.content(digest)
            if raw is None:
                return None
            if label.endswith("a"):
                specific.add(digest)
            images.extend(kernel_images(raw, origin, path=f"{entry.source} {label}", label=""))
    return ShippedKernels(
        origin=origin,
        release=entry.release,
        machine=entry.machine,
        source=entry.source,
        library=entry.library,
        verified=entry.verified,
        labels=entry.labels or tuple(entry.cubins),
        images=tuple(images),
        arch_specific=frozenset(specific),
        from_cache=from_cache,
        notes=entry.notes,
    )


def _finish(origin: str, key: str, entry: Entry, arch: int | None, cache: ReleaseCache) -> ShippedKernels:
    cache.put(key, entry)
    _require_kernel(origin, entry)
    found = _load(origin, entry, arch, cache, False)
    if found is None:
        raise OurFaultError(f"{origin}: a cubin that was just found is not there")
    return found


#: Said of a library in which there is no GPU code, or none that can be read.
_NO_CODE = "(it carries no GPU code at all)"


def _require_kernel(origin: str, entry: Entry) -> None:
    if entry.cubins:
        return
    looked = ", ".join(entry.searched) or "nothing that could hold GPU code"
    version = as_version(entry.release)
    hint = "; the first release with one is 0.20.0" if version is not None and version < Version("0.20.0") else ""
    if all(name.endswith(_NO_CODE) for name in entry.searched):  # then it was not shown to be absent from vLLM's GPU code
        raise KernelNotFoundError(f"{origin}: no GPU code that could be read, so no {KERNEL.decode()}: {looked}{hint}")
    raise KernelNotFoundError(f"{origin}: no {KERNEL.decode()} in {looked}{hint}")


# ---------------------------------------------------------------------------------------------------------------------------------
# Libraries and cubins


def _keep_all(found: dict[str, list[bytes]], cache: ReleaseCache) -> dict[str, tuple[str, ...]]:
    ordered = sorted(found, key=lambda label: (int("".join(filter(str.isdigit, label))), label))
    return {label: tuple(cache.keep(raw) for raw in found[label]) for label in ordered}


def _from_wheel(
    opened: OpenWheel, folder: Path, cache: ReleaseCache, *, everything: bool, release: str | None, members: dict[str, str]
) -> Entry:
    """Search a wheel's libraries, likely ones first; ``everything``: all others too."""
    wheel = opened.wheel
    likely: list[str] = []
    for pattern in LIKELY_LIBRARIES:
        likely.extend(name for name in wheel.matching([pattern]) if name not in likely)
    rest = (
        sorted((name for name in wheel.names if name.endswith(".so") and name not in likely), key=wheel.size) if everything else []
    )
    searched: list[str] = []
    lost: list[str] = []
    entry = Entry(
        release=release,
        machine=opened.machine,
        source=opened.source,
        source_sha256=opened.sha256,
        verified=opened.verified,
        names=cache.keep(json.dumps(wheel.names).encode()),
        members=members,
    )
    for name in [*likely, *rest]:
        path = folder / "library.so"
        with path.open("wb") as stream:
            digest = wheel.extract(name, stream, what=f"{opened.source}: {name}")
        try:
            found = search_library(path, name, folder, strict=False) if path.stat().st_size else FoundCode()
        except (CubinError, DeadlineError) as error:  # it must not stop the search in the others
            lost.append(str(error)[:500])
            continue
        finally:
            bare = not carries_code(path, name)
            path.unlink()
        searched.append(f"{name} {_NO_CODE}" if bare and not found.cubins else name)
        if found.cubins:
            cubins = _keep_all(found.cubins, cache)
            return entry.model_copy(
                update={
                    "library": name, "library_sha256": digest, "cubins": cubins, "searched": tuple(searched),
                    "notes": (*lost, *found.notes),
                }
            )  # fmt: skip
    _require_read(lost)
    return entry.model_copy(update={"searched": tuple(searched)})


def _require_read(lost: Sequence[str]) -> None:
    """Where nothing was found, what could not be read is the answer: it may hold the kernel."""
    if lost:
        raise CubinError(("; ".join(lost))[:1500])


# ---------------------------------------------------------------------------------------------------------------------------------
# Releases


def _release(version: Version, arch: int | None, progress: Progress | None, cache: ReleaseCache) -> ShippedKernels:
    """From this machine's wheel; where that has no code for ``arch``, from the other one's, if it has (wheels for x86-64 and
    aarch64 are built for different lists of GPUs, and GPU code runs wherever the GPU is)."""
    machines = list(dict.fromkeys((host_machine(), "x86_64", "aarch64")))
    found = _release_for(version, machines, arch, progress, cache)
    if arch is None or found.images:
        return found
    for machine in machines:
        if machine != found.machine:
            with contextlib.suppress(DownloadError, KernelNotFoundError):
                other = _release_for(version, [machine], arch, progress, cache)
                if other.images:
                    return other
    return found


def _release_for(
    version: Version, machines: Sequence[str], arch: int | None, progress: Progress | None, cache: ReleaseCache
) -> ShippedKernels:
    origin = f"vllm=={version}"

    def kept() -> ShippedKernels | None:
        entries = cache.entries()
        for machine in machines:
            entry = entries.get(f"{origin}@{machine}")
            if entry is not None and (entry.cubins or entry.searched):
                _require_kernel(origin, entry)
                return _load(origin, entry, arch, cache, True)
        return None

    found = kept()
    if found is not None:
        return found
    with cache.lock(origin):
        found = kept()
        if found is not None:
            return found
        with fetching(origin, version, cache, progress, machines) as (opened, folder):
            key = f"{origin}@{opened.machine}"
            old = cache.entries().get(key, Entry())
            entry = _from_wheel(opened, folder, cache, everything=False, release=str(version), members=old.members)
        return _finish(origin, key, entry, arch, cache)


# ---------------------------------------------------------------------------------------------------------------------------------
# Files on this machine


def _sha256_of(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CubinError(f"cannot be read: {error.strerror or error}", path=str(path)) from None


def _file(spec: str, path: Path, arch: int | None, cache: ReleaseCache) -> ShippedKernels:
    head = kernel_file_head(path)
    key = f"file:{_sha256_of(path)}"
    found = _of_cache(spec, key, arch, cache)
    if found is not None:
        return found
    if is_zip(head):
        entry = _from_local_wheel(path, cache)
    elif is_elf(head) or head[:4] == b"\x50\xed\x55\xba":
        key, entry = _from_local_object(path, key, arch, cache)
    else:
        raise CubinError(
            "neither a wheel (zip) nor an ELF file nor a fat binary", path=str(path), place=f"starts with {head[:8].hex()}"
        )
    return _finish(spec, key, entry, arch, cache)


def _limited(key: str, arch: int | None) -> str:
    """The key of what was found for one architecture alone."""
    return key if arch is None else f"{key}@sm_{arch}"


def _kept(key: str, arch: int | None, cache: ReleaseCache) -> Entry | None:
    """What is known of a file, of all its code or of that for ``arch`` alone."""
    entries = cache.entries()
    known = (entries.get(name) for name in dict.fromkeys((key, _limited(key, arch))))
    return next((entry for entry in known if entry is not None and (entry.cubins or entry.searched)), None)


def _of_cache(spec: str, key: str, arch: int | None, cache: ReleaseCache) -> ShippedKernels | None:
    known = _kept(key, arch, cache)
    if known is None:
        return None
    _require_kernel(spec, known)
    return _load(spec, known, arch, cache, True)


def _from_local_wheel(path: Path, cache: ReleaseCache) -> Entry:
    with path.open("rb") as stream, cache.work_folder() as folder:
        wheel = WheelFile(stream, path.name)
        about = wheel.metadata()
        if not about:
            raise CubinError("a zip archive, but no wheel: it has no .dist-info with METADATA and WHEEL", path=str(path))
        opened = OpenWheel(
            wheel, path.name, about.get("Tag", "")[:120], None, "members by CRC-32 and by the sha256 in the wheel's RECORD"
        )
        release = about.get("Version") if about.get("Name", "").lower() == "vllm" else None
        return _from_wheel(opened, Path(folder), cache, everything=True, release=release, members={})


def _from_local_object(path: Path, key: str, arch: int | None, cache: ReleaseCache) -> tuple[str, Entry]:
    """What an object holds, and its key: for ``arch`` alone where it has the kernel for it, else of everything."""
    with cache.work_folder() as folder:
        found = search_file(path, Path(folder), arch)
        what = path.name if found.carries else f"{path.name} {_NO_CODE}"
        if arch is not None and not found.cubins:
            try:  # it may have the kernel for others: the answer names them
                found = search_file(path, Path(folder), None)
                arch = None
            except (CubinError, DeadlineError):
                what = f"{path.name} (its code for sm_{arch}; other code in it cannot be read)"
    entry = Entry(
        source=path.name, verified="as given", library=path.name, cubins=_keep_all(found.cubins, cache), labels=found.labels,
        searched=(what,), notes=found.notes,
    )  # fmt: skip
    return _limited(key, arch), entry


# ---------------------------------------------------------------------------------------------------------------------------------
# The installed vLLM


def _installed(arch: int | None, cache: ReleaseCache) -> ShippedKernels:
    version, folder = installed_vllm()
    libraries = sorted(
        {path for pattern in ("_C_stable_libtorch*.so", "_C*.so", "*.so") for path in folder.glob(pattern)}, key=_likely_first
    )
    looked: list[str] = []
    lost: list[str] = []
    for library in libraries:
        looked.append(library.name)
        try:
            key = f"file:{_sha256_of(library)}"
            entry = _kept(key, arch, cache)
            if entry is None:
                key, entry = _from_local_object(library, key, arch, cache)
                cache.put(key, entry)
        except (CubinError, DeadlineError) as error:  # it must not stop the search in the others
            lost.append(str(error)[:500])
            continue
        if entry.cubins:
            named = entry.model_copy(
                update={
                    "release": version, "source": f"installed vLLM {version}", "library": f"vllm/{library.name}",
                    "notes": (*lost, *entry.notes),
                }
            )  # fmt: skip
            found = _load("installed", named, arch, cache, False)
            if found is not None:
                return found
    _require_read(lost)
    raise KernelNotFoundError(f"the installed vLLM {version} has no {KERNEL.decode()} in {', '.join(looked) or 'any library'}")


def _likely_first(path: Path) -> tuple[bool, bool, str]:
    return (not path.name.startswith("_C_stable"), not path.name.startswith("_C"), path.name)
