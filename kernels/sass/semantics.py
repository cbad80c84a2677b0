"""What each instruction computes, stated once over any ``Algebra``. Memory, control flow and warp-wide operations are the engine's.

``execute`` applies one instruction to a ``Context``, which reads operands and takes results; a guard is the context's
business. A form that is not covered raises ``NoSemanticsError``: the engine turns it into an error that names instruction,
offset and kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .decode import Instruction
from .rules import Context, NoSemanticsError
from .rules_float import convert, farith, fmnmx, fsetp, hfma2, sel
from .rules_integer import iadd, iadd3, imad, imnmx, ldc, lea, mov, special, unary, viaddmnmx, vimnmx3
from .rules_logic import isetp, lop3, p2r, plop3, prmt, r2p, shf

__all__ = ["SEMANTICS", "Context", "NoSemanticsError", "execute"]

V = TypeVar("V")
Rule = Callable[[Instruction, Context[Any]], None]

#: Opcode to rule. What is not here is memory, control flow or warp-wide, and belongs to the engine.
SEMANTICS: Mapping[str, Rule] = {
    "IADD3": iadd3, "UIADD3": iadd3, "IADD": iadd, "VIADD": iadd, "UVIADD": iadd, "IMAD": imad, "UIMAD": imad,
    "LEA": lea, "ULEA": lea, "LOP3": lop3, "ULOP3": lop3, "PLOP3": plop3, "UPLOP3": plop3, "ISETP": isetp, "UISETP": isetp,
    "SHF": shf, "USHF": shf, "PRMT": prmt, "UPRMT": prmt,
    "IMNMX": imnmx, "UIMNMX": imnmx, "VIMNMX": imnmx, "UVIMNMX": imnmx,
    "VIADDMNMX": viaddmnmx, "VIMNMX3": vimnmx3, "SEL": sel, "USEL": sel, "FSEL": sel, "MOV": mov, "UMOV": mov, "R2UR": mov,
    "POPC": unary, "UPOPC": unary, "FLO": unary, "UFLO": unary, "BREV": unary, "UBREV": unary, "IABS": unary,
    "P2R": p2r, "R2P": r2p, "S2R": special, "S2UR": special, "CS2R": special, "LDC": ldc, "LDCU": ldc, "ULDC": ldc,
    "FADD": farith, "FMUL": farith, "FSETP": fsetp, "FMNMX": fmnmx, "I2F": convert, "I2FP": convert, "F2I": convert,
    "F2F": convert, "MUFU": convert, "HFMA2": hfma2,
}  # fmt: skip


def execute(instruction: Instruction, context: Context[V]) -> bool:
    """Apply a pure instruction; False if its opcode belongs to the engine. NoSemanticsError for a form that is not covered."""
    rule = SEMANTICS.get(instruction.opcode)
    if rule is None:
        return False
    if instruction.problem:
        raise NoSemanticsError(instruction.problem)
    rule(instruction, context)
    return True
