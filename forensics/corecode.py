"""Which machine code a grid of a core dump runs: from its module handle and entry address to one function's cubin.

The search is bounded: symbol tables that are kept, images that are looked at, and look-ups in all (``limits``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CubinError
from . import limits
from .codeimage import EmbeddedImage, FunctionSymbol
from .coresections import CoreSections
from .coretables import MODULE, Kind
from .device_state import CodeImage

__all__ = ["CodeFinder", "rows_as_dicts"]


def rows_as_dicts(rows: Any) -> list[dict[str, int]]:
    """A table's rows by field name; the fields that its driver did not write are missing. None (not readable) gives none."""
    if rows is None:
        return []
    names = rows.dtype.names
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]


class CodeFinder:
    """Finds functions in the code images of one dump; what is not found is noted with the sections."""

    def __init__(self, sections: CoreSections) -> None:
        self.s = sections
        self.image_bytes = 0
        self.lookups = 0
        self._images: dict[int, EmbeddedImage | None] = {}
        self._slim: dict[tuple[int, str], bytes | None] = {}
        kinds = (Kind.RELOCATED_IMAGE, Kind.IMAGE)
        self.all_images = [int(number) for kind in kinds for number in sections.of_kind(kind)[: limits.MAX_IMAGES_SEARCHED]]

    def modules(self, devices: int, index: int) -> dict[int, list[int]]:
        """Module handle to the numbers of its image sections (relocated first) on one device."""
        images: dict[int, list[int]] = {}
        contexts = self.s.child(Kind.CONTEXTS, devices, index)
        if contexts is None:
            return images
        for _, modules in self.s.children(Kind.MODULES, contexts):
            handles = [row["module"] for row in rows_as_dicts(self.s.rows_of(modules, MODULE, limits.MAX_MODULES))]
            for kind in (Kind.RELOCATED_IMAGE, Kind.IMAGE):
                for row, section in self.s.children(kind, modules):
                    if row < len(handles):
                        images.setdefault(handles[row], []).append(section)
        return images

    def _image(self, section: int) -> EmbeddedImage | None:
        if section not in self._images:
            size = int(self.s.size[section])
            if self.image_bytes > limits.MAX_IMAGE_TABLES:
                return None
            try:
                if self.s.bytes_of(section, 0) is None:
                    raise CubinError("lies past the file's end", path=self.s.name_of(section))
                image = EmbeddedImage(
                    lambda start, length: self.s.bytes_of(section, length, start) or b"", size, self.s.name_of(section)
                )
                self.image_bytes += image.cost
                self._images[section] = image
            except CubinError as error:
                self.s.note("a module's code image", str(error))
                self._images[section] = None
        return self._images[section]

    def find(
        self, grid: Mapping[str, int], images: dict[int, list[int]], sm: int | None
    ) -> tuple[FunctionSymbol | None, CodeImage | None]:
        """The grid's kernel: by module and entry address, else by entry address in any module, else the module's only kernel."""
        entry, own = grid["entry"], images.get(grid["module"], [])
        candidates = list(dict.fromkeys([*own, *self.all_images]))[: limits.MAX_IMAGES_SEARCHED]
        for section in candidates:
            self.lookups += 1
            if self.lookups > limits.MAX_IMAGE_LOOKUPS:
                break
            image = self._image(section)
            found = image.at(entry) if image is not None and entry else None
            if image is not None and found is not None:
                return found, self._cut(section, image, found, entry, sm)
        for section in own:
            image = self._image(section)
            inside = image.containing(entry) if image is not None and entry else None
            only = image.kernels(2) if image is not None else []
            if image is not None and (inside or len(only) == 1):
                found = inside[0] if inside else only[0]
                reason = "its section holds it" if inside else "its module has no other kernel"
                self.s.note(f"entry address of {found.name}", f"no symbol at {entry:#x}; taken because {reason}")
                return found, self._cut(section, image, found, entry, sm)
        if not candidates:
            why = "the dump holds no code image"
        elif self.lookups > limits.MAX_IMAGE_LOOKUPS or self.image_bytes > limits.MAX_IMAGE_TABLES:
            why = "the code images' symbol tables are larger than is searched"
        else:
            why = f"no function at {entry:#x} in the first {len(candidates)} code images"
        self.s.note(f"machine code of grid {grid['grid']}", why, "a dump without the flag skip_relocated_elf_images holds it")
        return None, None

    def _cut(self, section: int, image: EmbeddedImage, symbol: FunctionSymbol, entry: int, sm: int | None) -> CodeImage | None:
        key = (section, symbol.name)
        if key not in self._slim:
            try:
                self._slim[key] = image.function_image(symbol)
            except CubinError as error:
                self.s.note(f"machine code of {symbol.name}", str(error))
                self._slim[key] = None
        cubin = self._slim[key]
        return None if cubin is None else CodeImage(cubin, symbol.name, entry or None, sm)
