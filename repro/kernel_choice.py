"""From what was written after ``--kernel`` to one kernel image, and what is known about its guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.image import KernelImage
from ..kernels.plan import DEFAULT_PROFILE

__all__ = ["ChosenKernel", "choose_kernel"]

#: ``progress(what, done_bytes, total_bytes or None)`` while a release is fetched.
Progress = Callable[[str, int, "int | None"], None]


@dataclass(frozen=True, slots=True)
class ChosenKernel:
    """``release``: the vLLM release whose launcher's arithmetic goes with it. ``guarded``: whether the row length is bounded before
    use, None if not known; ``guard_source``: from where that is known.
    """

    image: KernelImage
    release: str
    guarded: bool | None
    guard_source: str
    verified: str = ""


def choose_kernel(spec: str, sm: int, top_k: int, vec: int, *, progress: Progress | None = None) -> ChosenKernel:
    """``builtin[:VARIANT]``, ``vllm==X``, ``installed`` or a path.

    Raises KernelNotFoundError, CubinError, DownloadError, ToolMissingError.
    """
    from ..kernels.build import builtin_image, parse_builtin

    builtin = parse_builtin(spec)
    if builtin is not None:
        variant, settings = builtin
        image = builtin_image(variant, sm, top_k, vec, settings=settings)
        return ChosenKernel(image, DEFAULT_PROFILE, image.guarded, "built so", "compiled here")
    from ..kernels.shipped import shipped_kernels

    found = shipped_kernels(spec, arch=sm, progress=progress)
    image = found.pick(sm, top_k, vec)
    if image.guarded is not None:
        return ChosenKernel(image, found.release or DEFAULT_PROFILE, image.guarded, "read from the code", found.verified)
    release = _plain_release(found.release)
    if release is None:
        return ChosenKernel(image, DEFAULT_PROFILE, None, "no known release: only an audit can tell", found.verified)
    from ..kernels.plan import release_profile

    return ChosenKernel(image, release, release_profile(release).guarded, f"table of releases, vLLM {release}", found.verified)


def _plain_release(text: str | None) -> str | None:
    """A release number, or None for a nightly, a local build or a fork: those are never judged by the number they carry."""
    from packaging.version import InvalidVersion, Version

    if text is None:
        return None
    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return None if version.is_devrelease or version.is_prerelease or version.local is not None else str(version)
