"""``--kernel``: whose code runs. From what the user wrote to one kernel image for one GPU, and how well it fits that GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KernelNotFoundError, ToolMissingError
from .image import KernelImage

__all__ = ["Selection", "select", "select_kernel"]

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """The image, and whether it was built for exactly this GPU's architecture. ``note``: one sentence for the first lines of a run:
    where the code is from, how it was checked, and which architecture's code was taken if not the GPU's own.
    """

    image: KernelImage
    exact: bool
    note: str
    release: str | None = None


def select(spec: str, *, sm: int, top_k: int, vec: int, progress: Progress | None = None, interpreted: bool = False) -> Selection:
    """The kernel that ``spec`` names, for a GPU of architecture ``sm`` (e.g. 120), k and vector width.

    ``spec``: ``builtin``, ``builtin:VARIANT``, ``vllm==0.27.1``, ``installed``, or a path. ``interpreted``: where our own kernel
    cannot be compiled here, the decoded code that ships with the package is taken (an image without a cubin). Raises
    KernelNotFoundError, UsageError, CubinError, DownloadError, ToolMissingError.
    """
    if spec.partition(":")[0] == "builtin":
        from .build import builtin_image, parse_builtin

        parsed = parse_builtin(spec)
        if parsed is None:
            raise KernelNotFoundError(f"--kernel {spec[:120]!r} is no build of the builtin kernel")
        variant, settings = parsed
        try:
            image = builtin_image(variant, sm, top_k, vec, settings=settings)
        except (ToolMissingError, KernelNotFoundError) as error:
            kept = _shipped(variant, sm, top_k, vec) if interpreted and not settings else None
            if kept is None:
                raise
            note = (
                f"{kept.origin}: the decoded code for sm_{sm} that ships with this package ({error}); a core dump of this run "
                "holds no machine code"
            )
            return Selection(kept, True, note)
        return Selection(image, True, f"{image.origin}: compiled here by NVRTC for sm_{sm}")
    from .shipped import shipped_kernels

    found = shipped_kernels(spec, arch=sm, progress=progress)
    image = found.pick(sm, top_k, vec)
    exact = image.sm == sm
    where = f"{found.source}, {found.library}" if found.library and found.library != found.source else found.source
    fit = f"code for sm_{sm}" if exact else f"no code for sm_{sm} itself; code for sm_{image.sm} is binary compatible and is taken"
    checked = f"; checked: {found.verified}" if found.verified and found.verified != "as given" else ""
    lost = f"; {'; '.join(found.notes[:2])}"[:400] if found.notes else ""
    return Selection(image, exact, f"{image.origin}: {fit}, from {where}{checked}{lost}", found.release)


def _shipped(variant: str, sm: int, top_k: int, vec: int) -> KernelImage | None:
    from .sass.shipped import shipped_image

    return shipped_image(variant, sm, top_k, vec)


def select_kernel(spec: str, *, sm: int, top_k: int, vec: int, progress: Progress | None = None) -> KernelImage:
    """The image that ``select`` finds."""
    return select(spec, sm=sm, top_k=top_k, vec=vec, progress=progress).image
