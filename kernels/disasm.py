"""Machine code as text: NVIDIA's nvdisasm run under a deadline, its answers cached.

nvdisasm comes with the wheel ``nvidia-cuda-nvdisasm`` and needs neither driver nor GPU. What it prints is read by ``sasstext``,
whose records are re-exported here.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Clock, Deadline
from ..errors import CubinError, DeadlineError, ToolMissingError
from .cache import Cache, content_key
from .elf import function_symbols, read_elf
from .image import sha256_hex
from .sasstext import INSTRUCTION_BYTES, Disassembly, Listing, SassLine, parse_json, parse_listing, split_operands

__all__ = [
    "INSTRUCTION_BYTES",
    "Disassembly",
    "Listing",
    "SassLine",
    "disassemble",
    "disassemble_functions",
    "disassemble_raw",
    "disassemble_section",
    "nvdisasm_path",
    "nvdisasm_version",
    "parse_json",
    "parse_listing",
    "split_operands",
    "text_symbols",
]

#: nvdisasm's answer may be this long (8.2 MB were measured for all 25 kernels of a shipped cubin) and its process this large.
MAX_OUTPUT_BYTES = 192 << 20
MAX_CHILD_BYTES = 4 << 30
#: Part of the cache key: raised when the normalisation in ``sasstext`` changes.
_FORMAT = "sass-1"


# ---------------------------------------------------------------------------------------------------------------------------------
# Running nvdisasm


def nvdisasm_path() -> Path:
    """The disassembler of the wheel (``nvidia/cu13/bin/nvdisasm``), else one on PATH; ToolMissingError names the remedy."""
    relative = (Path("cu13/bin/nvdisasm"), Path("cu14/bin/nvdisasm"), Path("cuda_nvdisasm/bin/nvdisasm"))
    for base in _nvidia_folders():
        for tail in relative:
            candidate = base / tail
            if candidate.is_file():
                if not os.access(candidate, os.X_OK):
                    continue
                return candidate
    found = shutil.which("nvdisasm")
    if found:
        return Path(found)
    raise ToolMissingError("nvdisasm is not installed", help_text="pip install nvidia-cuda-nvdisasm")


def _nvidia_folders() -> list[Path]:
    """Every ``nvidia`` namespace folder on ``sys.path`` (the wheels share it and none of them is imported)."""
    seen: list[Path] = []
    for entry in sys.path:
        folder = Path(entry or ".") / "nvidia"
        if folder.is_dir() and folder not in seen:
            seen.append(folder)
    return seen


@lru_cache(maxsize=8)
def _version_of(path: str, _size: int, _mtime: int) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissingError(
            f"{path} does not run: {error}", help_text="pip install --force-reinstall nvidia-cuda-nvdisasm"
        ) from None
    match = re.search(rb"V(\d+\.\d+\.\d+)", done.stdout)
    if done.returncode != 0 or match is None:
        raise ToolMissingError(
            f"{path} --version says {(done.stdout + done.stderr)[:120]!r}",
            help_text="pip install --force-reinstall nvidia-cuda-nvdisasm",
        )
    return match[1].decode()


def nvdisasm_version(path: Path | None = None) -> str:
    """``13.5.37``; part of every cache key. Raises ToolMissingError."""
    tool = path or nvdisasm_path()
    facts = tool.stat()
    return _version_of(str(tool), facts.st_size, facts.st_mtime_ns)


def _run(tool: Path, arguments: Sequence[str], what: str, deadline_s: float, clock: Clock) -> bytes:
    """nvdisasm's stdout; DeadlineError, CubinError (its own message) or ToolMissingError. Output and memory are bounded."""
    deadline = Deadline(deadline_s, clock)
    try:
        child = subprocess.Popen([str(tool), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ToolMissingError(
            f"{tool} does not run: {error}", help_text="pip install --force-reinstall nvidia-cuda-nvdisasm"
        ) from None
    with child:
        try:
            if hasattr(resource, "prlimit"):
                with contextlib.suppress(OSError, ValueError):
                    resource.prlimit(child.pid, resource.RLIMIT_AS, (MAX_CHILD_BYTES, MAX_CHILD_BYTES))
            assert child.stdout is not None
            assert child.stderr is not None
            said: dict[int, list[bytes]] = {child.stdout.fileno(): [], child.stderr.fileno(): []}
            sizes = dict.fromkeys(said, 0)
            with selectors.DefaultSelector() as selector:
                for number in said:
                    selector.register(number, selectors.EVENT_READ)
                while selector.get_map():
                    ready = selector.select(deadline.remaining())
                    if not ready and deadline.expired:
                        raise DeadlineError(f"nvdisasm took longer than {deadline_s:g} s for {what}")
                    for key, _ in ready:
                        piece = os.read(key.fd, 1 << 20)
                        if not piece:
                            selector.unregister(key.fd)
                            continue
                        sizes[key.fd] += len(piece)
                        if sizes[key.fd] > MAX_OUTPUT_BYTES:
                            raise CubinError(f"nvdisasm wrote more than {MAX_OUTPUT_BYTES >> 20} MiB", path=what)
                        said[key.fd].append(piece)
            try:
                status = child.wait(max(deadline.remaining(), 1.0))
            except subprocess.TimeoutExpired:
                raise DeadlineError(f"nvdisasm took longer than {deadline_s:g} s for {what}") from None
        except BaseException:
            child.kill()
            raise
    output, errors = (b"".join(pieces) for pieces in said.values())
    if status != 0:
        lines = errors.decode("utf-8", "replace").splitlines()
        reason = "; ".join(line.strip() for line in lines[:3]) or f"exit status {status}"
        raise CubinError(f"nvdisasm cannot read it: {reason[:300]}", path=what)
    return output


# ---------------------------------------------------------------------------------------------------------------------------------
# The symbol indices that -fun wants


def text_symbols(cubin: bytes, path: str = "cubin") -> dict[str, tuple[int, dict[str, int]]]:
    """Functions of a cubin: mangled name to (symbol index, {function in the same section: byte offset from this one}).

    A name that several sections have (a local subroutine) stands for the first. Raises CubinError with the place.
    """
    symbols = list(function_symbols(read_elf(cubin, path)))
    by_section: dict[int, dict[str, int]] = {}
    for symbol in symbols:
        by_section.setdefault(symbol.section, {})[symbol.name] = symbol.value
    found: dict[str, tuple[int, dict[str, int]]] = {}
    for symbol in symbols:
        if symbol.name not in found:
            starts = by_section[symbol.section]
            found[symbol.name] = (symbol.index, {name: start - symbol.value for name, start in starts.items()})
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# With the cache


def disassemble(
    cubin: bytes, function: str, *, deadline_s: float = 30.0, cache: Cache | None = None, clock: Clock = SYSTEM
) -> Disassembly:
    """The machine code of one kernel of a cubin, from the cache or by nvdisasm.

    ``function`` is the mangled name. Raises CubinError (no such function, not readable), ToolMissingError, DeadlineError.
    """
    return disassemble_functions(cubin, (function,), deadline_s=deadline_s, cache=cache, clock=clock)[function]


def disassemble_functions(
    cubin: bytes, functions: Sequence[str], *, deadline_s: float = 30.0, cache: Cache | None = None, clock: Clock = SYSTEM
) -> dict[str, Disassembly]:
    """As ``disassemble``, for several kernels of one cubin in one run of nvdisasm."""
    store = cache if cache is not None else Cache("sass")
    tool = nvdisasm_path()
    digest = sha256_hex(cubin)
    result: dict[str, Disassembly] = {}
    for name in functions:
        kept = _load(store, digest, name, tool)
        if kept is not None:
            result[name] = kept
    wanted = [name for name in dict.fromkeys(functions) if name not in result]
    if not wanted:
        return result
    symbols = text_symbols(cubin)
    heads: dict[str, tuple[int, dict[str, int]]] = {}
    for name in wanted:
        head = symbols.get(name)
        if head is None:
            raise CubinError(f"no function {name}", path=f"cubin {digest[:12]}", place=".symtab")
        heads[name] = head
    with tempfile.NamedTemporaryFile(prefix="dsv4-repro-", suffix=".cubin") as copy:
        copy.write(cubin)
        copy.flush()
        indices = ",".join(str(heads[name][0]) for name in wanted)
        raw = _run(tool, ["-json", "-fun", indices, copy.name], f"cubin {digest[:12]}", deadline_s, clock)
    parsed = parse_json(raw, wanted)
    for name in wanted:
        found = parsed.get(name)
        if found is None or not found.lines:
            raise CubinError(f"nvdisasm gave no instruction of {name}", path=f"cubin {digest[:12]}")
        whole = Disassembly(name, found.sm, found.lines, heads[name][1], found.producer)
        _save(store, digest, whole, tool)
        result[name] = whole
    return result


def disassemble_raw(
    code: bytes, sm: int, *, function: str = "", deadline_s: float = 30.0, cache: Cache | None = None, clock: Clock = SYSTEM
) -> Disassembly:
    """Machine code without an ELF around it (a core dump's relocated code, bytes read from memory): ``sm`` is 90 for sm_90.

    Calls then give offsets, not symbols. Raises as ``disassemble``; CubinError for a length that is no whole instruction.
    """
    if not code or len(code) % INSTRUCTION_BYTES:
        raise CubinError(f"{len(code)} bytes are not a whole number of {INSTRUCTION_BYTES}-byte instructions", path="machine code")
    store = cache if cache is not None else Cache("sass")
    tool = nvdisasm_path()
    digest = content_key("raw", str(sm), code)
    kept = _load(store, digest, function, tool)
    if kept is not None:
        return kept
    with tempfile.NamedTemporaryFile(prefix="dsv4-repro-", suffix=".bin") as copy:
        copy.write(code)
        copy.flush()
        raw = _run(tool, ["-json", "-b", f"SM{sm}", copy.name], f"machine code {digest[:12]}", deadline_s, clock)
    parsed = parse_json(raw)
    if len(parsed) != 1:
        raise CubinError(f"nvdisasm gave {len(parsed)} functions for one piece of code", path=f"machine code {digest[:12]}")
    found = next(iter(parsed.values()))
    whole = Disassembly(function, found.sm, found.lines, {}, found.producer)
    _save(store, digest, whole, tool)
    return whole


def disassemble_section(
    cubin: bytes, function: str, sm: int, *, deadline_s: float = 30.0, cache: Cache | None = None, clock: Clock = SYSTEM
) -> Disassembly:
    """One kernel from the bytes of its section alone, for an ELF that nvdisasm itself refuses (a core dump's relocated image).

    Calls give offsets, and relocations that were not applied stay as they are. Raises as ``disassemble_raw``; CubinError if
    there is no section ``.text.<function>``.
    """
    image = read_elf(cubin)
    section = image.section(f".text.{function}")
    if section is None:
        raise CubinError(f"no section .text.{function}", path="cubin")
    return disassemble_raw(image.content(section), sm, function=function, deadline_s=deadline_s, cache=cache, clock=clock)


def _key(digest: str, function: str, tool: Path) -> str:
    return content_key(_FORMAT, nvdisasm_version(tool), digest, function)


def _save(store: Cache, digest: str, item: Disassembly, tool: Path) -> None:
    document: dict[str, Any] = {
        "function": item.function,
        "sm": item.sm,
        "producer": item.producer,
        "symbols": dict(item.symbols),
        "lines": [[line.predicate, line.opcode, *line.operands] for line in item.lines],
    }
    store.store(_key(digest, item.function, tool), gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 6, mtime=0))


def _load(store: Cache, digest: str, function: str, tool: Path) -> Disassembly | None:
    raw = store.load(_key(digest, function, tool))
    if raw is None:
        return None
    try:
        document = json.loads(gzip.decompress(raw))
        lines = tuple(
            SassLine(index * INSTRUCTION_BYTES, guard, sys.intern(opcode), tuple(rest))
            for index, (guard, opcode, *rest) in enumerate(document["lines"])
        )
        return Disassembly(document["function"], document["sm"], lines, document["symbols"], document["producer"])
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error):
        return None
