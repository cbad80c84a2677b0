"""Decoded code of the kernels written here, shipped with the package: a first run needs neither NVRTC nor nvdisasm.

One file for each build and architecture, ``code/BUILD.sm_NN.json.xz``: the instances' instructions as (opcode, operands,
predicate) rows, what their cubins say of themselves, the compiler, and the sha256 of the source. ``python -m
dsv4_repro.kernels.sass.shipped`` writes them anew, which is needed after every change of ``sources/persistent_topk.cu`` (a test
compares).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import OurFaultError
from ..image import KernelImage, sha256_hex

__all__ = ["SHIPPED_ARCHITECTURES", "SHIPPED_BUILDS", "shipped_facts", "shipped_image", "shipped_rows", "write_shipped"]

Rows = tuple[tuple[str, str, str], ...]
CODE = Path(__file__).with_name("code")
SHIPPED_BUILDS = ("unguarded", "guard")
SHIPPED_ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
_SCHEMA = "dsv4-repro/code/1"


def _path(build: str, sm: int, folder: Path) -> Path:
    return folder / f"{build}.sm_{sm}.json.xz"


@lru_cache(maxsize=4)
def _document(build: str, sm: int) -> Mapping[str, Any] | None:
    if build not in SHIPPED_BUILDS or sm not in SHIPPED_ARCHITECTURES:
        return None
    path = _path(build, sm, CODE)
    try:
        document = json.loads(lzma.decompress(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, lzma.LZMAError, EOFError) as error:
        raise OurFaultError(f"{path.name} of this installation is damaged: {error}") from error
    if document.get("schema") != _SCHEMA:
        raise OurFaultError(f"{path.name} of this installation is of another version")
    return dict(document)


def shipped_facts(build: str, sm: int) -> Mapping[str, Any] | None:
    """``compiler`` and ``source_sha256`` of the shipped code of a build; None if none is shipped."""
    return _document(build, sm)


def _build_of(origin: str) -> str:
    head, _, build = origin.partition(":")
    return (build or "unguarded") if head == "builtin" else ""


def shipped_image(build: str, sm: int, top_k: int, vec: int) -> KernelImage | None:
    """A kernel of ours without its cubin (``cubin`` is empty, ``cubin_sha256`` that of the one that was decoded), for the
    interpreter; None if not shipped. ``Program.from_image`` takes it.
    """
    document = _document(build, sm)
    found = None if document is None else document["instances"].get(f"{top_k}.{vec}")
    if found is None:
        return None
    origin = "builtin" if build == "unguarded" else f"builtin:{build}"
    return KernelImage(
        origin=origin, cubin=b"", sm=sm, top_k=top_k, vec=vec, label=f"{origin} sm_{sm} <{top_k},{vec}>", **found["image"]
    )


def shipped_rows(origin: str, sm: int, cubin_sha256: str, function: str) -> tuple[Rows, Mapping[str, int]] | None:
    """Rows and subroutine offsets of one of our kernels by the sha256 of its cubin; None if the package does not hold exactly
    that one.
    """
    document = _document(_build_of(origin), sm)
    if document is None:
        return None
    for found in document["instances"].values():
        if found["image"]["cubin_sha256"] == cubin_sha256 and found["image"]["function"] == function:
            return tuple((row[0], row[1], row[2]) for row in found["rows"]), dict(found["symbols"])
    return None


def make_document(build: str, sm: int) -> dict[str, Any]:
    """Compile and decode all instances of one build for one architecture. ToolMissingError without NVRTC and nvdisasm."""
    from ..abi import TOP_K_VALUES, VECTOR_WIDTHS
    from ..build import builtin_image, compiler_version, source_path
    from ..disasm import disassemble

    instances: dict[str, Any] = {}
    for top_k in TOP_K_VALUES:
        for vec in VECTOR_WIDTHS:
            image = builtin_image(build, sm, top_k, vec)
            code = disassemble(image.cubin, image.function)
            facts = ("cubin_sha256", "function", "params_base", "params_size", "static_smem", "registers", "max_threads", "guarded")
            instances[f"{top_k}.{vec}"] = {
                "image": {name: getattr(image, name) for name in facts},
                "symbols": dict(code.symbols),
                "rows": [list(row) for row in code.rows],
            }
    source = sha256_hex(source_path("persistent_topk.cu").read_bytes())
    return {"schema": _SCHEMA, "compiler": compiler_version(), "source_sha256": source, "instances": instances}


def write_shipped(folder: Path = CODE) -> list[Path]:
    """Write every file anew; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for build in SHIPPED_BUILDS:
        for sm in SHIPPED_ARCHITECTURES:
            raw = json.dumps(make_document(build, sm), separators=(",", ":")).encode()
            path = _path(build, sm, folder)
            path.write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
            written.append(path)
    _document.cache_clear()
    return written


if __name__ == "__main__":
    for item in write_shipped():
        print(f"{item.stat().st_size:8d} {item}")
