"""A vLLM release by number: its wheel on the configured index, and only what is needed out of it.

The wheel (300 MB) is read in ranges: its directory, then one library (60 MB packed). Where the server refuses ranges it is
downloaded whole and checked against the sha256 that the index gives. What was checked, and how, is said in ``verified``.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from packaging.version import InvalidVersion, Version

from ..errors import CubinError, DownloadError, KernelNotFoundError, UsageError
from .package_index import Candidate, Connection, IndexSettings, choose_wheel, list_wheels, pip_settings, shown
from .ranged import Progress, RangedFile, RangesRefusedError, download_whole
from .release_cache import ReleaseCache
from .wheels import WheelFile

__all__ = [
    "OpenWheel",
    "as_version",
    "exists",
    "fetching",
    "find_wheel",
    "host_machine",
    "installed_vllm",
    "kernel_file_head",
    "looks_like_release",
    "open_wheel",
    "parse_release",
]

PACKAGE = "vllm"


def host_machine() -> str:
    """``x86_64`` or ``aarch64``: which wheel is looked for first. GPU code is the same in kind in both."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def parse_release(spec: str) -> Version:
    """``vllm==0.27.1`` as a version. UsageError for anything else."""
    name, separator, text = spec.partition("==")
    try:
        if separator and name.strip().lower() == PACKAGE:
            version = Version(text.strip()[:64])
            # 0.26 and 0.26.0 are one release; the name with three numbers is the one that is kept.
            missing = 3 - len(version.release)
            return (
                version
                if missing <= 0
                else Version(version.base_version + ".0" * missing + str(version)[len(version.base_version) :])
            )
    except InvalidVersion:
        pass
    raise UsageError(
        f"--kernel {spec[:120]!r} is no release, file or variant",
        help_text="--kernel builtin | vllm==0.27.1 | installed | FILE.whl | FILE.so | FILE.cubin",
    )


def exists(path: Path) -> bool:
    """Whether there is such a file; no also for names that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def looks_like_release(spec: str) -> bool:
    """Whether ``spec`` is meant as a release and not as a file."""
    return "==" in spec and not exists(Path(spec).expanduser())


def as_version(text: str | None) -> Version | None:
    """A version that somebody else wrote; None if it is none."""
    try:
        return Version(text[:64]) if text else None
    except InvalidVersion:
        return None


@dataclass(frozen=True, slots=True)
class OpenWheel:
    """A wheel being read. ``verified``: how the bytes that were read are checked."""

    wheel: WheelFile
    source: str
    machine: str
    sha256: str | None
    verified: str


def find_wheel(
    version: Version, *, settings: IndexSettings | None = None, machines: Sequence[str] = ("x86_64", "aarch64")
) -> tuple[Candidate, str]:
    """The wheel of a release for the first of ``machines`` that it has one for, and that machine.

    KernelNotFoundError says which releases or files there are instead; DownloadError if the index cannot be read.
    """
    candidates = list_wheels(PACKAGE, settings or pip_settings())
    for name in machines:
        found = choose_wheel(candidates, version, name)
        if found is not None:
            return found, name
    same = [candidate.filename for candidate in candidates if candidate.version == version]
    if same:
        raise KernelNotFoundError(f"vLLM {version} has no Linux wheel for {' or '.join(machines)}; it has {', '.join(same[:4])}")
    versions = sorted({candidate.version for candidate in candidates})
    if not versions:
        raise KernelNotFoundError("the configured index offers no wheel of vLLM")
    place = bisect.bisect(versions, version)
    near = versions[max(place - 4, 0) : place + 4]
    raise KernelNotFoundError(
        f"there is no vLLM {version} on the configured index; it has {versions[0]} to {versions[-1]}, "
        f"near it {', '.join(map(str, near))}"
    )


@contextlib.contextmanager
def open_wheel(
    candidate: Candidate, machine: str, folder: Path, *, settings: IndexSettings | None = None, progress: Progress | None = None
) -> Iterator[OpenWheel]:
    """The wheel, in ranges where the server gives them, else whole in ``folder``. DownloadError, CubinError."""
    if candidate.url.startswith("file:"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        with Path(url2pathname(urlsplit(candidate.url).path)).open("rb") as stream:
            yield _whole(stream, candidate, machine)
        return
    connection = Connection(settings or pip_settings())
    ranged: RangedFile | None = None
    with contextlib.suppress(RangesRefusedError):
        ranged = RangedFile(candidate.url, connection, progress=progress, folder=folder)
    if ranged is not None:
        if candidate.size is not None and candidate.size != ranged.size:
            raise DownloadError(f"{shown(candidate.url)}: {ranged.size} bytes, but the index says {candidate.size}")
        verified = "members by CRC-32 and by the sha256 in the wheel's RECORD (the wheel itself was read in ranges, not whole)"
        yield OpenWheel(WheelFile(ranged, candidate.filename), candidate.filename, machine, None, verified)
        return
    path = folder / "wheel"
    with path.open("w+b") as stream:
        download_whole(candidate.url, connection, stream, size=candidate.size, what=candidate.filename, progress=progress)
        yield _whole(stream, candidate, machine)


def _whole(stream: IO[bytes], candidate: Candidate, machine: str) -> OpenWheel:
    stream.seek(0)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    if candidate.sha256 is not None and candidate.sha256 != digest:
        raise DownloadError(f"{shown(candidate.url)}: sha256 {digest[:16]}…, but the index says {candidate.sha256[:16]}…")
    how = (
        "sha256 of the whole wheel, as the index gives it" if candidate.sha256 else "CRC-32 of members (the index gives no sha256)"
    )
    stream.seek(0)
    return OpenWheel(WheelFile(stream, candidate.filename), candidate.filename, machine, digest, how)


@contextlib.contextmanager
def fetching(
    origin: str, version: Version, cache: ReleaseCache, progress: Progress | None, machines: Sequence[str]
) -> Iterator[tuple[OpenWheel, Path]]:
    """The release's wheel on the index, for the first of ``machines`` that it has one for, open. OSErrors become DownloadError."""
    try:
        candidate, machine = find_wheel(version, machines=machines)
        with cache.work_folder() as name:
            folder = Path(name)
            with open_wheel(candidate, machine, folder, progress=progress) as opened:
                yield opened, folder
    except OSError as error:
        raise DownloadError(f"{origin}: {error.strerror or error}") from None


def installed_vllm() -> tuple[str, Path]:
    """Version and package folder of this environment's vLLM, without importing it. KernelNotFoundError if there is none."""
    from importlib import metadata

    try:
        distribution = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        raise KernelNotFoundError(
            "vLLM is not installed in this Python environment",
            help_text="Name a release instead, fetched from the index: vllm==0.27.1",
        ) from None
    folder = Path(str(distribution.locate_file("vllm")))
    if not folder.is_dir():
        raise KernelNotFoundError(f"the installed vLLM {distribution.version} has no folder {folder} (an editable install?)")
    return distribution.version, folder


def kernel_file_head(path: Path) -> bytes:
    """The first 64 bytes of a file given after ``--kernel``. KernelNotFoundError, UsageError (a folder, a pipe), CubinError."""
    if exists(path) and path.is_dir():
        raise UsageError(f"--kernel {path}: a folder; give a wheel, a shared object or a cubin in it")
    if not exists(path):
        raise KernelNotFoundError(
            f"--kernel {str(path)[:200]!r}: no such file, and neither builtin, installed nor a release such as vllm==0.27.1"
        )
    if not path.is_file():
        raise UsageError(f"--kernel {path}: not a regular file")
    try:
        with path.open("rb") as stream:
            return stream.read(64)
    except OSError as error:
        raise CubinError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
