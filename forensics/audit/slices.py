"""The sliced machine code of a kernel image: disassembled once per cubin, analysed once, kept in the user's cache by content.

A cache entry holds the instructions of the prologue and what the flow analysis knew about them (some 10 kB a kernel); its key
includes the code
that made it, so that a changed analysis never meets old facts. Everything is proved anew from the facts on each run.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import CubinError
from ...kernels.cache import Cache, content_key
from ...kernels.disasm import Disassembly, disassemble_functions
from ...kernels.image import KernelImage
from ...kernels.sass.decode import decode_rows
from ...kernels.sass.slice import SliceFacts, slice_facts
from ...kernels.sass.slice_flow import analyse_flow

__all__ = ["SliceStore", "facts_from_json", "facts_to_json"]


@lru_cache(maxsize=1)
def _analysis_version() -> str:
    """A hash over the modules that decide what the facts are."""
    folder = Path(__file__).resolve().parents[2] / "kernels" / "sass"
    digest = hashlib.sha256()
    for name in (
        "decode",
        "isa",
        "operands",
        "semantics",
        "algebra",
        "slice",
        "slice_flow",
        "slice_liveness",
        "symbolic",
        "symbolic_algebra",
        "symbolic_terms",
    ):
        try:
            digest.update((folder / f"{name}.py").read_bytes())
        except OSError:
            digest.update(name.encode())
    return digest.hexdigest()


def facts_to_json(facts: SliceFacts) -> bytes:
    """The cache form."""
    document = {
        "name": facts.name, "sm": facts.sm, "rows": [[offset, *row] for offset, row in facts.rows.items()],
        "symbols": dict(facts.symbols),
        "heads": sorted(facts.heads), "barrier": sorted(facts.barrier), "alone": sorted(facts.alone), "polls": facts.polls,
        "arrivals": facts.arrivals, "counter_stores": facts.counter_stores,
        "live": [[block, hex(mask)] for block, mask in facts.live.items()],
        "loops": [[head, [list(item) for item in written], local] for head, (written, local) in facts.loop_writes.items()],
        "loop_blocks": sorted(facts.loop_blocks), "instructions": facts.instructions, "unfollowed": facts.unfollowed,
    }  # fmt: skip
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)


def facts_from_json(raw: bytes) -> SliceFacts:
    """ValueError, KeyError, TypeError or zlib.error for anything that ``facts_to_json`` did not write."""
    document: Any = json.loads(zlib.decompressobj().decompress(raw, 8 << 20))
    loops = {
        head: (tuple((str(kind), int(index)) for kind, index in written), None if local is None else tuple(local))
        for head, written, local in document["loops"]
    }
    return SliceFacts(
        document["name"], document["sm"], {offset: (a, b, c) for offset, a, b, c in document["rows"]}, document["symbols"],
        frozenset(document["heads"]), frozenset(document["barrier"]), frozenset(document["alone"]), tuple(document["polls"]),
        tuple(document["arrivals"]), tuple(document["counter_stores"]), {block: int(mask, 16) for block,
        mask in document["live"]}, loops,
        frozenset(document["loop_blocks"]), document["instructions"],
        tuple(document["unfollowed"]),
    )  # fmt: skip


class SliceStore:
    """Facts of kernel images. ``whole(image)`` analyses the whole function; ``cached(image)`` gives the trimmed facts, if they
    are kept."""

    def __init__(self, cache: Cache | None = None, text_cache: Cache | None = None) -> None:
        self._cache = cache if cache is not None else Cache("slice")
        self._text_cache = text_cache
        self._listings: dict[tuple[str, str], Disassembly] = {}
        self.disassembler_calls = 0

    def _key(self, image: KernelImage) -> str:
        return content_key("slice", _analysis_version(), image.cubin_sha256, image.function, str(image.params_base))

    def cached(self, image: KernelImage) -> SliceFacts | None:
        raw = self._cache.load(self._key(image))
        if raw is None:
            return None
        try:
            return facts_from_json(raw)
        except (ValueError, KeyError, TypeError, zlib.error):
            return None

    def keep(self, image: KernelImage, facts: SliceFacts, touched: Iterable[int]) -> None:
        """Stores what an exploration of ``touched`` instructions needs."""
        self._cache.store(self._key(image), facts_to_json(facts.trimmed(frozenset(touched))))

    def disassemble(self, images: Iterable[KernelImage]) -> None:
        """Disassembles all of ``images``, which must be of one cubin, with one call of the disassembler; drops earlier cubins'
        text."""
        wanted = list(images)
        self._listings = {}
        if wanted:
            self.disassembler_calls += 1
            found = disassemble_functions(
                wanted[0].cubin, [image.function for image in wanted], cache=self._text_cache, deadline_s=60.0
            )
            self._listings = {(wanted[0].cubin_sha256, name): text for name, text in found.items()}

    def whole(self, image: KernelImage) -> SliceFacts:
        """The facts of the whole function. CubinError, UnknownInstructionError, BudgetError."""
        listing = self._listings.pop((image.cubin_sha256, image.function), None)
        if listing is None:
            self.disassembler_calls += 1
            listing = disassemble_functions(image.cubin, [image.function], cache=self._text_cache)[image.function]
        rows = [(line.opcode, ",".join(line.operands), line.predicate) for line in listing.lines]
        function = decode_rows(image.function, image.sm, rows, listing.symbols, strict=False)
        if not function.instructions:
            raise CubinError(f"{image.function} has no instructions", path=image.origin)
        return slice_facts(function, analyse_flow(function, image.params_base))
