"""A kernel ready to be interpreted: decoded instructions, constant-bank layout, and block functions kept in the user's cache.

Two caches: ``kernels.disasm`` keeps nvdisasm's answer by the cubin's sha256; here, under the same hash, the compiled block
functions are kept (Python code objects, by interpreter version and by a hash of the code generator), so a second run compiles
nothing.
"""

from __future__ import annotations

import marshal
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CubinError
from ..cache import Cache, content_key
from ..image import KernelImage, sha256_hex
from .blocks import Blocks, is_sync
from .decode import Instruction, SassFunction, decode_rows
from .lanes import block_globals
from .layout import ConstantLayout, layout_for

__all__ = ["Program"]

_SORTS: Mapping[str, Any] = {"w": np.uint32, "q": np.uint64, "s": np.int32, "i": np.intp}
_LITERAL = re.compile(r"([wqsi])(m?)(\d+)")


@lru_cache(maxsize=1)
def _generator_digest() -> str:
    """Hash of every module that the generated code may depend on: a changed generator never meets old code."""
    modules = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith(("symbolic", "slice")))
    return content_key(*(path.read_bytes() for path in modules))


@lru_cache(maxsize=1)
def _base_globals() -> dict[str, Any]:
    return block_globals()


class _CodeCache:
    """Code objects of one program: loaded at the first need, saved by ``save``."""

    def __init__(self, key: str, store: Cache | None) -> None:
        self._store = store
        self._key = content_key("blocks", key, _generator_digest(), sys.implementation.cache_tag or "", sys.version)
        self._code: dict[str, types.CodeType] = {}
        self._globals = dict(_base_globals())
        self.made = 0
        raw = store.load(self._key) if store is not None else None
        if raw is not None:
            self._restore(raw)

    def _restore(self, raw: bytes) -> None:
        try:
            kept = marshal.loads(raw)
        except (EOFError, ValueError, TypeError):
            return
        if isinstance(kept, dict):
            self._code = {name: code for name, code in kept.items() if isinstance(name, str) and isinstance(code, types.CodeType)}

    def load(self, name: str, source: Callable[[], str]) -> Callable[..., Any]:
        """The function of that name; ``source`` is asked only if it was never compiled."""
        code = self._code.get(name)
        if code is None:
            module = compile(source(), f"<block {name}>", "exec", dont_inherit=True, optimize=0)
            code = self._code[name] = next(constant for constant in module.co_consts if isinstance(constant, types.CodeType))
            self.made += 1
        space = self._globals
        for used in code.co_names:
            if used not in space:
                match = _LITERAL.fullmatch(used)
                if match is not None:
                    value = int(match.group(3))
                    space[used] = np.array(-value if match.group(2) else value, _SORTS[match.group(1)])
        return types.FunctionType(code, space)

    def save(self) -> bool:
        """Keep what was compiled since; False if there was nothing to keep or nowhere."""
        if not self.made or self._store is None:
            return False
        self.made = 0
        return self._store.store(self._key, marshal.dumps(self._code))


@dataclass
class Program:
    """One kernel function for the machine. ``registers``: per thread, for reports. ``frame``: bytes of stack it takes, if known."""

    function: SassFunction
    layout: ConstantLayout
    key: str
    registers: int = 255
    max_threads: int = 1024
    static_smem: int = 0
    origin: str = ""
    cubin: bytes = field(default=b"", repr=False)
    store: Cache | None = field(default=None, repr=False)
    _blocks: dict[bool, Blocks] = field(default_factory=dict, repr=False)
    _code: _CodeCache | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def sm(self) -> int:
        return self.function.sm

    @cached_property
    def waits(self) -> Mapping[int, Instruction]:
        """The instructions at which threads wait for others, by offset."""
        return {i.offset: i for i in self.function.instructions if is_sync(i)}

    def blocks(self, checks: bool) -> Blocks:
        """The blocks, with or without memory checks in their code."""
        found = self._blocks.get(checks)
        if found is None:
            if self._code is None:
                self._code = _CodeCache(self.key, self.store)
            found = self._blocks[checks] = Blocks(self.function, self.layout, checks, self._code.load)
        return found

    def save_code(self) -> bool:
        """Keep the compiled blocks in the user's cache."""
        return self._code is not None and self._code.save()

    @classmethod
    def from_rows(
        cls, name: str, sm: int, rows: Sequence[tuple[str, str, str]], symbols: Mapping[str, int], *, params_base: int,
        params_size: int, key: str = "", store: Cache | None = None, **facts: Any,
    ) -> Program:  # fmt: skip
        """From decoded rows (opcode, operands, predicate): what caches and tests hold."""
        function = decode_rows(name, sm, rows, symbols, strict=False)
        layout = layout_for(sm, params_base, params_size)
        digest = key or content_key("rows", name, str(sm), *("\t".join(row) for row in rows))
        return cls(function, layout, digest, store=store, **facts)

    @classmethod
    def from_image(cls, image: KernelImage, *, store: Cache | None = None, disassembly_cache: Cache | None = None) -> Program:
        """From a kernel image; disassembles it if neither the package nor the cache holds its code.

        CubinError, ToolMissingError, DeadlineError as ``kernels.disasm.disassemble`` raises them. Instructions without
        semantics raise only when a thread reaches them.
        """
        from .shipped import shipped_rows

        facts = {
            "registers": image.registers,
            "max_threads": image.max_threads,
            "static_smem": image.static_smem,
            "origin": image.origin,
            "cubin": image.cubin,
        }
        key = content_key("cubin", image.cubin_sha256, image.function)
        kept = store if store is not None else Cache("blocks")
        own = shipped_rows(image.origin, image.sm, image.cubin_sha256, image.function)
        if own is not None:
            rows, symbols = own
        elif not image.cubin:
            raise CubinError("neither machine code nor a shipped decoding of it", path=image.origin)
        else:
            from ..disasm import disassemble

            found = disassemble(image.cubin, image.function, cache=disassembly_cache)
            if found.sm != image.sm:
                raise CubinError(f"the code is for sm_{found.sm}, sm_{image.sm} was asked for", path=image.origin)
            rows, symbols = found.rows, found.symbols
        return cls.from_rows(
            image.function,
            image.sm,
            rows,
            symbols,
            params_base=image.params_base,
            params_size=image.params_size,
            key=key,
            store=kept,
            **facts,
        )

    @classmethod
    def from_cubin(cls, cubin: bytes, function: str, sm: int, *, store: Cache | None = None) -> Program:
        """From a cubin and a mangled name; CubinError if it holds no such kernel of the persistent top-k family or is for
        another architecture.
        """
        from ..cubin import kernel_images

        images = [image for image in kernel_images(cubin, f"cubin {sha256_hex(cubin)[:12]}") if image.function == function]
        if not images:
            raise CubinError(f"no kernel {function}", path=f"cubin {sha256_hex(cubin)[:12]}")
        if images[0].sm != sm:
            raise CubinError(f"the cubin is for sm_{images[0].sm}, sm_{sm} was asked for", path=f"cubin {sha256_hex(cubin)[:12]}")
        return cls.from_image(images[0], store=store)
