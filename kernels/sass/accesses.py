"""Code for memory instructions: LDG, STG, LDS, STS, LDL, STL, generic LD and ST, and atomics.

Global memory is one arena whose base address has a zero low word, so the low word of an address is its place in the arena.
Shared memory is one arena for all resident CTAs; ``S.shared_base`` says where a thread's CTA starts (words). Local memory is a
row of threads for each word. With checks on, a call that looks at every address comes before each access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .decode import Instruction
from .emit_values import Value
from .operands import RZ, Operand
from .semantics import NoSemanticsError

if TYPE_CHECKING:
    from .blocks import BlockWriter

__all__ = ["access"]

_SCALE = {"X4": 2, "X8": 3, "X16": 4}
_LOADS = {"LDG": "global", "LDS": "shared", "LDL": "local", "LD": "generic"}
_STORES = {"STG": "global", "STS": "shared", "STL": "local", "ST": "generic"}
_ATOMICS = {"ATOMG": "global", "REDG": "global", "RED": "global", "ATOMS": "shared"}
#: Which view of an arena a part of a word is read through.
_PART = {"": "", "U16": "h", "S16": "h", "U8": "b", "S8": "b"}
#: Bytes of a part of a word.
_PART_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2}
_ARENA = {"global": "G", "shared": "H"}


def _width(i: Instruction) -> tuple[int, str]:
    """(words, sub-word kind): (1, ""), (2, ""), (4, ""), or (1, "U8" …)."""
    for modifier in i.modifiers:
        if modifier in ("U8", "S8", "U16", "S16"):
            return 1, modifier
    return (4 if i.has("128") else 2 if i.has("64") else 1), ""


def _address(i: Instruction, w: BlockWriter, operand: Operand, wide: bool) -> tuple[Value, Value]:
    """(low word, high word) of the address; the high word means something only for 64-bit addresses."""
    a = w.algebra
    if wide and not i.has("E"):
        raise NoSemanticsError("32-bit global address")
    quad, low = a.quad(0), a.word(0)
    if operand.index is not None and operand.index != RZ:
        base = w.read(operand.index)
        if not wide:
            if operand.mode in ("64", "U32"):
                raise NoSemanticsError(f"address {operand.text}")
            low = a.shl(base, a.word(_SCALE.get(operand.mode, 0)))
        elif operand.mode == "U32" and operand.ubase is not None:
            quad = a.zext(base)
        elif operand.mode == "64" or (operand.mode == "" and operand.ubase is None):
            quad = a.pair(base, w.read(operand.index + 1))
        else:
            raise NoSemanticsError(f"address {operand.text}")
    if operand.ubase is not None and operand.ubase != RZ:
        above = w.read(256 + operand.ubase)
        if wide:
            quad = a.addq(quad, a.pair(above, w.read(256 + operand.ubase + 1)))
        else:
            low = a.add(low, above)
    if not wide:
        return a.add(low, a.word(operand.value)), a.word(0)
    quad = a.addq(quad, a.quad(operand.value))
    return _low_sum(w, quad), a.high(quad)


def _low_sum(w: BlockWriter, quad: Value) -> Value:
    """Low word of a sum of quads, without the 64-bit addition: in the unchecked case nobody needs the high word."""
    a = w.algebra
    if quad.const is not None:
        return a.word(quad.const)
    if quad.op == "addq":
        return a.add(_low_sum(w, quad.args[0]), _low_sum(w, quad.args[1]))
    return a.low(quad)


def _index(w: BlockWriter, low: Value, space: str, sub: str) -> Value:
    """Element number in the arena: a value of sort i."""
    a = w.algebra
    shift = {"": 2, "U16": 1, "S16": 1, "U8": 0, "S8": 0}[sub]
    name = {2: "index", 1: "index1", 0: "index0"}[shift]
    place = a.literal(low.const >> shift, "i") if low.const is not None else a.make(name, "i", low)
    if space != "shared" or w.single:
        return place
    base = w.per_thread({2: "S.shared_base", 1: "S.shared_base2", 0: "S.shared_base1"}[shift])
    return a.make("offset", "i", base, place)


def _check(i: Instruction, w: BlockWriter, space: str, low: Value, high: Value, size: int, how: str) -> None:
    """With checks on, one call before the access. ``how``: load, store or atomic."""
    if not w.checks:
        return
    a = w.algebra
    guard = "None" if w.guard.const == 1 else a.ref(w.guard)
    a.lines.append(f"S.check({space!r}, {a.ref(low)}, {a.ref(high)}, {size}, ix, {i.offset}, {how!r}, {guard})")


def _guarded(w: BlockWriter, statement: str) -> None:
    guard = w.guard
    w.algebra.lines.append(statement if guard.const == 1 else f"if {w.algebra.ref(guard)}: {statement}")


def _load(i: Instruction, w: BlockWriter, space: str) -> None:
    (operand,) = i.sources
    words, sub = _width(i)
    low, high = _address(i, w, operand, space in ("global", "generic"))
    _check(i, w, space, low, high, _PART_BYTES.get(sub, 4 * words), "load")
    dest = i.dests[-1]
    if dest.index == RZ:
        return
    assert dest.index is not None
    loaded = [_load_word(w, space, low, high, k, sub, dest.index + k) for k in range(words)]
    guard, w.guard = w.guard, w.algebra.truth(True)
    for k, value in enumerate(loaded):
        w.write(dest.index + k, value)
    w.guard = guard


def _load_word(w: BlockWriter, space: str, low: Value, high: Value, k: int, sub: str, number: int) -> Value:
    """One loaded word with the guard applied: ``old`` stays where it is false."""
    a = w.algebra
    always = w.guard.const == 1
    if space in ("local", "generic"):
        return _load_by_call(w, space, a.add(low, a.word(4 * k)), high, sub, number)
    place = _index(w, a.add(low, a.word(4 * k)) if k and low.const is not None else low, space, sub)
    arena = _ARENA[space] + _PART[sub]
    if k and low.const is None:
        arena += str(k)
    w.needs.add(arena)
    kind = place.kind
    text = f"{arena}.item({a.ref(place)})" if kind == "u" else f"{arena}[{a.ref(place)}]" + (".astype(u4)" if sub else "")
    if not always:
        old = w.read(number)
        if w.guard.kind == "v":
            kind, text = "v", f"load_where({arena}, {a.ref(place)}, {a.ref(w.guard)}, {a.ref(old)}, u4)"
        elif kind == "u" and old.kind == "u":
            text = f"{text} if {a.ref(w.guard)} else {a.ref(old)}"
        else:
            text = f"full(n, {text}, u4)" if kind == "u" else text
            kind, text = "v", f"{text} if {a.ref(w.guard)} else {a.whole(old)}"
    value = a.stated(text, kind, "w", alias=kind == "v" and not always)
    return _signed(w, value, sub)


def _signed(w: BlockWriter, value: Value, sub: str) -> Value:
    if sub[:1] != "S":
        return value
    if w.guard.const != 1:
        raise NoSemanticsError("guarded load of a signed part")
    bits = w.algebra.word(24 if sub == "S8" else 16)
    return w.algebra.sar(w.algebra.shl(value, bits), bits)


def _load_by_call(w: BlockWriter, space: str, low: Value, high: Value, sub: str, number: int) -> Value:
    a = w.algebra
    always = w.guard.const == 1
    guard = "None" if always else a.ref(w.guard)
    if space == "local":
        if low.kind == "u" and always and not sub:
            place = a.ref(_index(w, low, space, ""))
            if w.mode == "one":
                return a.stated(f"S.row({place}).item(ix)", "u", "w")
            return a.stated(f"S.row({place})" + (".copy()" if w.mode == "all" else "[ix].copy()"), "v", "w")
        text = f"S.load_local({a.ref(low)}, ix, {guard}, n, {sub!r})"
    else:
        text = f"S.load_generic({a.ref(low)}, {a.ref(high)}, ix, {guard}, n, {sub!r})"
    value = a.stated(text, "u" if w.mode == "one" else "v", "w")
    value = (
        value
        if sub[:1] != "S"
        else w.algebra.sar(a.shl(value, a.word(24 if sub == "S8" else 16)), a.word(24 if sub == "S8" else 16))
    )
    return value if always else a.choose(w.guard, value, w.read(number))


def _store(i: Instruction, w: BlockWriter, space: str) -> None:
    a = w.algebra
    operand, source = i.sources
    words, sub = _width(i)
    low, high = _address(i, w, operand, space in ("global", "generic"))
    _check(i, w, space, low, high, _PART_BYTES.get(sub, 4 * words), "store")
    if source.kind not in ("reg", "ureg"):
        raise NoSemanticsError(f"stored operand {source.text}")
    for k in range(words):
        number = None if source.index == RZ else (source.index or 0) + k + (256 if source.kind == "ureg" else 0)
        value = a.word(0) if number is None else w.read(number)
        guard = "None" if w.guard.const == 1 else a.ref(w.guard)
        if space == "local":
            if low.kind == "u" and not sub and w.guard.kind == "u":
                row = a.ref(_index(w, a.add(low, a.word(4 * k)), space, ""))
                _guarded(w, f"S.store_row({row}, ix, {a.ref(value)})")
            else:
                a.lines.append(f"S.store_local({a.ref(a.add(low, a.word(4 * k)))}, ix, {a.ref(value)}, {guard}, n, {sub!r})")
            continue
        if space == "generic":
            arguments = f"{a.ref(a.add(low, a.word(4 * k)))}, {a.ref(high)}, ix, {a.ref(value)}, {guard}, n, {sub!r}"
            a.lines.append(f"S.store_generic({arguments})")
            continue
        place = _index(w, a.add(low, a.word(4 * k)) if k and low.const is not None else low, space, sub)
        arena = _ARENA[space] + _PART[sub]
        if k and low.const is None:
            arena += str(k)
        w.needs.add(arena)
        if sub:
            value = a.and_(value, a.word(0xFF if sub.endswith("8") else 0xFFFF))
        if w.guard.kind == "v":
            a.lines.append(f"S.writes += store_where({arena}, {a.ref(place)}, {a.ref(w.guard)}, {a.ref(value)})")
            continue
        text = a.ref(value)
        if place.kind == "u" and value.kind == "v":
            text = f"{text}[-1]"
        _guarded(w, f"{arena}[{a.ref(place)}] = {text}; S.writes += 1")


def _atomic(i: Instruction, w: BlockWriter, space: str) -> None:
    a = w.algebra
    operand, *values = i.sources
    operations = [m for m in i.modifiers if m in ("ADD", "MIN", "MAX", "AND", "OR", "XOR", "EXCH", "CAS")]
    if i.modifiers == ("POPC", "INC", "32"):
        operation, data = "ADD", [a.word(1)]
        if values or i.dests[0].index != RZ:
            raise NoSemanticsError("value of ATOMS.POPC.INC")
    else:
        if len(operations) != 1 or i.has("64") or i.has("INC") or i.has("DEC") or i.has("POPC"):
            raise NoSemanticsError("atomic operation")
        operation = operations[0] + ("S" if operations[0] in ("MIN", "MAX") and i.has("S32") else "")
        data = [w.word(value) for value in values]
    if len(data) != (2 if operation == "CAS" else 1):
        raise NoSemanticsError("operands of an atomic")
    registers = [d for d in i.dests if d.kind == "reg"]
    if any(d.kind != "reg" and d.index != 7 for d in i.dests):
        raise NoSemanticsError("predicate of an atomic")
    dest = registers[0].index if registers and registers[0].index != RZ else None
    low, high = _address(i, w, operand, space == "global")
    _check(i, w, space, low, high, 4, "atomic")
    arena = _ARENA[space]
    w.needs.add(arena)
    place = _index(w, low, space, "")
    always = w.guard.const == 1
    guard = "None" if always else a.ref(w.guard)
    arguments = f"{arena}, {a.ref(place)}, {operation!r}, {', '.join(a.ref(d) for d in data)}"
    if w.mode == "one":
        if dest is None:
            _guarded(w, f"S.atomic_one({arguments})")
            return
        text = f"S.atomic_one({arguments})" + ("" if always else f" if {guard} else {a.ref(w.read(dest))}")
        value = a.stated(text, "u", "w")
    else:
        call = f"S.atomic({arguments}, guard={guard}, n=n, wanted={dest is not None})"
        if dest is None:
            a.lines.append(call)
            return
        value = a.stated(call, "v", "w")
        value = value if always else a.choose(w.guard, value, w.read(dest))
    saved, w.guard = w.guard, a.truth(True)
    w.write(dest, value)
    w.guard = saved


def access(i: Instruction, w: BlockWriter) -> bool:
    """Write the code of a memory instruction; False if ``i`` is none."""
    if i.opcode in _LOADS:
        _load(i, w, _LOADS[i.opcode])
    elif i.opcode in _STORES:
        _store(i, w, _STORES[i.opcode])
    elif i.opcode in _ATOMICS:
        _atomic(i, w, _ATOMICS[i.opcode])
    else:
        return False
    return True
