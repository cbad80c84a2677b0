"""What is known of the instruction set: mnemonics, the modifiers that may stand on them, and where destinations end.

A mnemonic or modifier that is not listed has no semantics here, and whoever meets one must say so. Sources: the CUDA binary
utilities manual (instruction set reference, Turing to Blackwell) for the names; their meaning was established by running
shipped kernels against reference results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .operands import Operand

__all__ = ["MODIFIERS", "NO_OPERATION", "destination_count", "unknown_part"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOAD_GLOBAL = _names("E 64 128 U8 S8 U16 S16 U SYS STRONG GPU CTA SM CONSTANT EF LTC128B LTC64B LTC256B WEAK EL EU LU NA")
_MEMORY_LOCAL = _names("64 128 U8 S8 U16 S16 U LU 32")
_ATOMIC = _names("E ADD MIN MAX AND OR XOR EXCH CAS INC DEC S32 U32 64 STRONG GPU SYS CTA SM")
_COMPARE = _names("LT LE GT GE EQ NE U32 S32 S64 U64 AND OR XOR EX")

#: Opcode to the modifiers known on it.
MODIFIERS: Mapping[str, frozenset[str]] = {
    # integer arithmetic
    "IADD3": frozenset({"X"}),
    "UIADD3": frozenset({"X", "64"}),
    "IADD": frozenset({"64"}),
    "VIADD": frozenset(),
    "UVIADD": frozenset(),
    "IMAD": _names("MOV IADD SHL U32 X WIDE HI S32"),
    "UIMAD": _names("MOV IADD SHL U32 X WIDE HI S32"),
    "LEA": _names("HI X SX32"),
    "ULEA": _names("HI X SX32"),
    "IABS": frozenset(),
    "IMNMX": frozenset({"U32", "S32"}),
    "UIMNMX": frozenset({"U32", "S32"}),
    "VIMNMX": frozenset({"U32", "S32"}),
    "UVIMNMX": frozenset({"U32", "S32"}),
    "VIADDMNMX": frozenset({"U32", "S32"}),
    "VIMNMX3": frozenset({"U32", "S32"}),
    "POPC": frozenset(),
    "UPOPC": frozenset(),
    "FLO": frozenset({"U32", "SH"}),
    "UFLO": frozenset({"U32", "SH"}),
    "BREV": frozenset(),
    "UBREV": frozenset(),
    # logic and moves
    "LOP3": frozenset({"LUT"}),
    "ULOP3": frozenset({"LUT"}),
    "PLOP3": frozenset({"LUT"}),
    "UPLOP3": frozenset({"LUT"}),
    "SHF": _names("L R U32 S32 U64 S64 HI W"),
    "USHF": _names("L R U32 S32 U64 S64 HI W"),
    "PRMT": frozenset(),
    "UPRMT": frozenset(),
    "SEL": frozenset({"64"}),
    "USEL": frozenset(),
    "MOV": frozenset({"64"}),
    "UMOV": frozenset({"64"}),
    "ISETP": _COMPARE,
    "UISETP": _COMPARE,
    "P2R": frozenset(),
    "R2P": frozenset(),
    "R2UR": frozenset(),
    "S2R": frozenset(),
    "S2UR": frozenset(),
    "CS2R": frozenset({"32"}),
    "LDC": _names("64 128"),
    "LDCU": _names("64 128"),
    "ULDC": _names("64 128"),
    # floating point
    "FADD": frozenset({"FTZ"}),
    "FMUL": frozenset({"FTZ"}),
    "FSETP": _names("LT LE GT GE EQ NE NEU LTU LEU GTU GEU EQU NUM NAN AND OR XOR FTZ"),
    "FSEL": frozenset(),
    "FMNMX": frozenset({"FTZ"}),
    "HFMA2": frozenset({"MMA"}),
    "MUFU": frozenset({"RCP"}),
    "I2F": _names("U32 S32 RP"),
    "I2FP": _names("F32 U32 S32"),
    "F2I": _names("FTZ U32 S32 TRUNC NTZ"),
    "F2F": _names("F16 F32"),
    # warp
    "VOTE": frozenset({"ANY", "ALL"}),
    "VOTEU": frozenset({"ANY", "ALL"}),
    "SHFL": _names("IDX UP DOWN BFLY"),
    "REDUX": frozenset({"SUM"}),
    # memory
    "LDG": _LOAD_GLOBAL,
    "LD": _LOAD_GLOBAL,
    "STG": _LOAD_GLOBAL,
    "ST": _LOAD_GLOBAL,
    "LDS": _MEMORY_LOCAL,
    "STS": _MEMORY_LOCAL,
    "LDL": _MEMORY_LOCAL,
    "STL": _MEMORY_LOCAL,
    "ATOMG": _ATOMIC,
    "RED": _ATOMIC,
    "REDG": _ATOMIC,
    "ATOMS": _ATOMIC | frozenset({"POPC", "32"}),
    # control
    "BRA": frozenset({"U", "DIV", "CONV"}),
    "BSSY": frozenset({"RECONVERGENT", "RELIABLE"}),
    "BSYNC": frozenset({"RECONVERGENT", "RELIABLE"}),
    "BREAK": frozenset({"RELIABLE"}),
    "BMOV": _names("32 CLEAR"),
    "BAR": _names("SYNC DEFER_BLOCKING"),
    "WARPSYNC": frozenset({"ALL", "COLLECTIVE"}),
    "CALL": _names("REL ABS NOINC"),
    "RET": _names("REL ABS NODEC"),
    "EXIT": frozenset(),
    "ENDCOLLECTIVE": frozenset(),
    # no effect in an interleaving model
    "NOP": frozenset(),
    "YIELD": frozenset(),
    "NANOSLEEP": frozenset({"SYNCS", "WARP"}),
    "MEMBAR": _names("ALL SC GPU SYS CTA VC"),
    "FENCE": _names("VIEW ASYNC"),
    "ERRBAR": frozenset(),
    "CGAERRBAR": frozenset(),
    "CCTL": _names("IVALL E C LDC U LDCU"),
    "DEPBAR": frozenset({"LE"}),
}  # fmt: skip

#: Instructions that change no state that a thread can see here.
NO_OPERATION = frozenset({"NOP", "YIELD", "NANOSLEEP", "MEMBAR", "FENCE", "ERRBAR", "CGAERRBAR", "CCTL", "DEPBAR"})

_STORES = frozenset({"ST", "STG", "STS", "STL", "RED", "REDG"})
_NO_DESTINATION = _STORES | NO_OPERATION | frozenset(
    {"BRA", "BSYNC", "BREAK", "BAR", "WARPSYNC", "CALL", "RET", "EXIT", "ENDCOLLECTIVE"}
)  # fmt: skip
_TWO_PREDICATES = frozenset({"ISETP", "UISETP", "FSETP", "PLOP3", "UPLOP3"})
_REGISTERS = frozenset({"reg", "ureg"})
_PREDICATES = frozenset({"pred", "upred"})


def unknown_part(opcode: str, modifiers: Sequence[str]) -> str:
    """What of a mnemonic has no semantics here, as a phrase; "" if all of it has."""
    known = MODIFIERS.get(opcode)
    if known is None:
        return f"unknown mnemonic {opcode}"
    for modifier in modifiers:
        if modifier not in known:
            return f"unknown modifier .{modifier} of {opcode}"
    return ""


def destination_count(opcode: str, operands: Sequence[Operand]) -> int:
    """How many of the printed operands, from the left, are written."""
    if opcode in _NO_DESTINATION:
        return 0
    if opcode in _TWO_PREDICATES:
        return min(2, len(operands))
    if opcode in ("VOTE", "VOTEU"):
        # ``VOTE.ANY R0,PT,P1`` writes a ballot and a predicate, ``VOTEU.ANY UP2,P5`` only the predicate.
        return max(len(operands) - 1, 0)
    if opcode in ("BSSY", "R2P"):
        return min(1, len(operands))
    count = 0
    while count < len(operands) and operands[count].kind in _PREDICATES:
        count += 1
    if count < len(operands) and operands[count].kind in _REGISTERS:
        count += 1
        if opcode not in ("SEL", "USEL", "FSEL"):
            while count < len(operands) and operands[count].kind in _PREDICATES:
                count += 1
    return count
