"""What is audited: from what the user wrote to the device code, the Python and the identity of a build.

A target is a release (``vllm==0.27.1``), a range of them (``vllm>=0.25,<0.34``), ``installed``, the path of a wheel, shared
object, fat binary or
cubin, the URL of a wheel, a build of the kernel written here (``builtin:guard``), or a running process, whose loaded libraries
and flags the
caller has read (``ProcessView``). Nothing of a target is executed or imported.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ...errors import DownloadError, KernelNotFoundError, ReproError, UsageError
from ...kernels.build import builtin_image, parse_builtin
from ...kernels.plan import ReleaseProfile, known_profiles, release_profile
from ...kernels.ranged import Progress
from ...kernels.release_sources import release_members
from ...kernels.shipped import LIKELY_LIBRARIES, ShippedKernels, shipped_kernels
from .known_builds import releases_with_cubins, releases_with_python
from .release_source import MEMBER_PATTERNS
from .verdicts import BuildIdentity, Unread

__all__ = ["OpenedTarget", "ProcessView", "expand_targets", "open_target"]

FIRST_RELEASE = "0.19.1"
BUILTIN_ARCHITECTURES = (90, 100, 120)
_TARGETS = (
    "A target is a release (vllm==0.27.1), installed, a wheel, a .so, a cubin, builtin:guard or a PID: dsv4-repro audit --help"
)
_LIBRARY = re.compile(r"/vllm/_C[^/]*\.so$")


@dataclass(frozen=True)
class ProcessView:
    """A running server: its loaded libraries (paths that can be opened here) and its command line."""

    pid: int
    libraries: tuple[str, ...]
    arguments: tuple[str, ...] = ()


@dataclass
class OpenedTarget:
    """``kernels`` None: no device code of the kernel. ``members``: the release's Python, empty if it is not at hand."""

    target: str
    identity: BuildIdentity
    kernels: ShippedKernels | None
    members: Mapping[str, bytes] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    absent: str = ""

    @property
    def version(self) -> str | None:
        """The release number of a known build, else what its metadata claims, for the launcher's arithmetic only."""
        texts = [
            self.identity.name.removeprefix("vllm=="),
            self.identity.claims,
            self.identity.name.rsplit(" ", 1)[-1].removeprefix("vllm=="),
        ]
        for text in texts:
            try:
                return str(Version(text[:64]).base_version)
            except InvalidVersion:
                continue
        return None

    def profile(self) -> tuple[ReleaseProfile, str]:
        """The launcher's arithmetic, and whose it is, in words."""
        version = self.version
        if version is not None:
            try:
                found = release_profile(version)
                known = (
                    "launcher arithmetic of this release"
                    if self.identity.known
                    else f"launcher arithmetic assumed as in vLLM {version}, which the build claims"
                )
                return found, known
            except ReproError:
                pass
        newest = known_profiles()[-1]
        return newest, f"launcher arithmetic assumed as in vLLM {newest.last}: the build's host code is not read"


def expand_targets(texts: Sequence[str]) -> list[str]:
    """Ranges become the releases that the configured index has; everything else stays. UsageError, DownloadError."""
    found: list[str] = []
    for text in texts:
        bare = text.strip()
        match = re.fullmatch(r"vllm\s*([<>=!~].*)", bare)
        if match is None or re.fullmatch(r"==\s*[^*,<>=!~]+", match[1]):
            found.append(bare.replace(" ", "") if match is not None else bare)
            continue
        try:
            wanted = SpecifierSet(match[1])
        except InvalidSpecifier:
            raise UsageError(f"{text[:120]!r} is no range of releases", help_text="For example: 'vllm>=0.25,<0.34'") from None
        versions = sorted(version for version in _published() if version in wanted and not version.is_prerelease)
        if not versions:
            raise KernelNotFoundError(f"no published release of vLLM is in {match[1]}", help_text=_TARGETS)
        found.extend(f"vllm=={version}" for version in versions)
    return list(dict.fromkeys(found))


def _published() -> list[Version]:
    from ...kernels.package_index import list_wheels, pip_settings

    found = {candidate.version for candidate in list_wheels("vllm", pip_settings())}
    return [version for version in found if version >= Version(FIRST_RELEASE)]


def _identity(
    target: str, kernels: ShippedKernels | None, members: Mapping[str, bytes], *, released: bool = False
) -> BuildIdentity:
    """Known only by bytes: from the index under its number, or device code and deciding Python files of one published release."""
    claims = _claimed(members) or (kernels.release or "" if kernels is not None else "")
    base: dict[str, Any] = {"claims": claims}
    if kernels is not None:
        base |= {"library": kernels.library or kernels.source, "machine": kernels.machine or "", "architectures": kernels.labels}
    if released:
        name = f"vllm=={kernels.release}" if kernels is not None and kernels.release is not None else target
        checked = f"; {kernels.verified}" if kernels is not None else ""
        return BuildIdentity(name=name, known=True, how=f"from the package index{checked}", **base)
    same = releases_with_cubins({image.cubin_sha256 for image in kernels.images}) if kernels is not None else ()
    code = releases_with_python(members)
    both = [version for version in same if version in code]
    if both:
        how = "its device code and its deciding Python files are those of this release, byte for byte"
        return BuildIdentity(name=f"vllm=={both[-1]}", known=True, how=how, **base)
    if same and not members:
        span = f"vllm=={same[0]}" if len(same) == 1 else f"vllm {same[0]} to {same[-1]}"
        return BuildIdentity(name=f"device code of {span}", known=True, how=f"cubins of {', '.join(same)}, byte for byte", **base)
    parts = [
        f"its device code is that of vLLM {same[0]}{' to ' + same[-1] if len(same) > 1 else ''}"
        if same
        else "its device code is of no release known here"
    ]
    if members:
        parts.append(
            f"its deciding Python files are those of {', '.join(code)}" if code else "its Python is of no release known here"
        )
    if claims:
        parts.append(f"it calls itself {claims}")
    return BuildIdentity(name="unknown build", known=False, how="; ".join(parts), **base)


def open_target(
    text: str, *, arch: int | None = None, process: ProcessView | None = None, progress: Progress | None = None
) -> OpenedTarget:
    """The build behind a target. Raises UsageError, KernelNotFoundError, CubinError, DownloadError for what cannot be opened at
    all.

    A build without this kernel is no error: ``kernels`` is None and ``absent`` says what was looked at.
    """
    if process is not None:
        return _process(text, process, arch)
    if parse_builtin(text) is not None:
        return _builtin(text, arch)
    if text.startswith(("http://", "https://")):
        return _url(text, arch, progress)
    released = "==" in text and not Path(text).exists()
    unread: list[Unread] = []
    kernels, absent = _kernels(text, arch, progress, unread)
    members: Mapping[str, bytes] = {}
    if released or text == "installed" or text.endswith(".whl"):
        try:
            members = release_members(text, MEMBER_PATTERNS, progress=progress)
        except KernelNotFoundError as error:
            unread.append(Unread(what="the build's Python", why=str(error)))
    else:
        why = "the target is device code only: the producer and the dispatch are not in it"
        unread.append(Unread(what="the build's Python", why=why, remedy="Audit the wheel, or: dsv4-repro audit installed"))
    identity = _identity(text, kernels, members, released=released)
    return OpenedTarget(text, identity, kernels, members, unread, absent)


def _kernels(text: str, arch: int | None, progress: Progress | None, unread: list[Unread]) -> tuple[ShippedKernels | None, str]:
    """The kernels, or None with the reason where the build simply has none; where it has no GPU code at all, that is unread."""
    try:
        return shipped_kernels(text, arch=arch, progress=progress), ""
    except KernelNotFoundError as error:
        if _holds_no_kernel(error):
            return None, str(error)
        if "no GPU code that could be read" in str(error):
            unread.append(Unread(what="the build's GPU code", why=str(error), remedy="Audit a wheel of vLLM for CUDA."))
            return None, ""
        # The same words are asked for by --kernel elsewhere: what helps here is another.
        raise KernelNotFoundError(str(error).removeprefix("--kernel "), help_text=_TARGETS) from None
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--kernel "), help_text=_TARGETS) from None


def _holds_no_kernel(error: KernelNotFoundError) -> bool:
    """Whether the target was read and simply holds no such kernel (a release before 0.20.0, a library without it)."""
    return bool(re.search(r"no persistent_topk_kernel in|no persistent top-k", str(error)))


def _claimed(members: Mapping[str, bytes]) -> str:
    for name, raw in members.items():
        if name.endswith(".dist-info/METADATA"):
            match = re.search(rb"^Version:\s*(\S{1,64})", raw[: 1 << 16], re.MULTILINE)
            if match is not None:
                return match[1].decode("ascii", "replace")
    return ""


def _builtin(text: str, arch: int | None) -> OpenedTarget:
    parsed = parse_builtin(text)
    assert parsed is not None
    variant, settings = parsed
    images = tuple(
        builtin_image(variant, sm, top_k, vec, settings=settings)
        for sm in ((arch,) if arch is not None else BUILTIN_ARCHITECTURES)
        for top_k in (512,)
        for vec in (4,)
    )
    labels = tuple(f"sm_{image.sm}" for image in images)
    kernels = ShippedKernels(text, None, None, "compiled here by NVRTC", None, "compiled here", labels, images)
    identity = BuildIdentity(name=text, known=True, how="compiled here from the package's own source", architectures=labels)
    why = "the kernel written here has no release around it"
    return OpenedTarget(text, identity, kernels, {}, [Unread(what="the build's Python", why=why)])


def _process(text: str, view: ProcessView, arch: int | None) -> OpenedTarget:
    """The library that the process has loaded; its Python is read from the same installation."""
    libraries = [path for path in view.libraries if _LIBRARY.search(path)]
    if not libraries:
        raise KernelNotFoundError(
            f"process {view.pid} has loaded no vLLM library",
            help_text="Give the PID of a worker (VllmWorker …) or of the server; its memory map must be readable.",
        )
    errors: list[str] = []
    for path in sorted(libraries, key=lambda item: "stable_libtorch" not in item):
        try:
            kernels = shipped_kernels(path, arch=arch)
        except KernelNotFoundError as error:
            errors.append(str(error))
            continue
        root = Path(path).parent.parent
        members = _installed_members(root)
        identity = _identity(text, kernels, members)
        return OpenedTarget(text, identity, kernels, members, [])
    return OpenedTarget(
        text, BuildIdentity(name=text, known=False, how="; ".join(errors)[:300]), None, {}, [], "; ".join(errors)[:300]
    )


def _installed_members(root: Path) -> dict[str, bytes]:
    """The Python of an installation that is not this interpreter's, bounded like a wheel's members."""
    from ...kernels.wheels import MAX_TEXT_BYTES, MAX_TEXTS_BYTES, match_names

    found: dict[str, bytes] = {}
    total = 0
    folders = [root / "vllm", *root.glob("vllm-*.dist-info")]
    paths = [
        path
        for folder in folders
        if folder.is_dir()
        for path in folder.rglob("*")
        if path.suffix == ".py" or path.name == "METADATA"
    ]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    for name in match_names(sorted(names), MEMBER_PATTERNS):
        try:
            with names[name].open("rb") as stream:
                raw = stream.read(MAX_TEXT_BYTES + 1)
        except OSError:
            continue
        total += len(raw)
        if len(raw) > MAX_TEXT_BYTES or total > MAX_TEXTS_BYTES:
            continue
        found[name] = raw
    return found


@contextmanager
def _work_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dsv4-repro-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _url(text: str, arch: int | None, progress: Progress | None) -> OpenedTarget:
    """A wheel by its address: the library and the Python are read in ranges where the server gives them."""
    from urllib.parse import unquote, urlsplit

    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    from ...kernels.package_index import Candidate, pip_settings, shown
    from ...kernels.releases import open_wheel

    try:
        name = unquote(urlsplit(text).path.rsplit("/", 1)[-1])
    except ValueError as error:
        raise UsageError(f"{ascii(text)[:200]} is no address: {error}") from None
    try:
        project, version, build, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        raise UsageError(f"{shown(text)[:200]} does not end in the name of a wheel") from None
    platforms = tuple(sorted({tag.platform for tag in tags}))
    candidate = Candidate(
        filename=name, url=text, version=version, build=build, platforms=platforms, sha256=None, size=None, yanked=False
    )
    if project != "vllm":
        raise UsageError(f"{name} is a wheel of {project}, not of vLLM")
    with _work_folder() as folder, open_wheel(candidate, "", folder, settings=pip_settings(), progress=progress) as opened:
        wheel = opened.wheel
        members = {item: wheel.read(item) for item in wheel.matching(MEMBER_PATTERNS)[:2000]}
        kernels: ShippedKernels | None = None
        absent = "no library of the wheel holds the kernel"
        for pattern in LIKELY_LIBRARIES:
            for item in wheel.matching((pattern,)):
                path = folder / "library.so"
                with path.open("wb") as stream:
                    wheel.extract(item, stream)
                try:
                    found = shipped_kernels(str(path), arch=arch)
                except KernelNotFoundError as error:
                    absent = str(error)
                    continue
                kernels = ShippedKernels(
                    text, None, None, name, item, opened.verified, found.labels, found.images, found.arch_specific
                )
                break
            if kernels is not None:
                break
    if kernels is None and not members:
        raise DownloadError(f"{shown(text)}: neither the kernel nor vLLM's Python is in it")
    identity = _identity(text, kernels, members)
    return OpenedTarget(text, identity, kernels, members, [], "" if kernels is not None else absent)
