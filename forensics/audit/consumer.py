"""The consumer layer: is there a row length for which a leader waits at the barrier and a member of its group does not come?

Asked of the machine code (``kernels.sass.slice``), for every instantiation and architecture of a build, over all 2^32 lengths and
all values of
stride and max_seq_len. And: does any length make the kernel treat a row as longer than min(stride, max_seq_len)? That is asked
as: does every
value that is read later stay the same if the length is first clamped to that range?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import ReproError
from ...kernels.devices import device_for_sm
from ...kernels.image import KernelImage
from ...kernels.plan import plan_launch
from ...kernels.sass.layout import layout_for
from ...kernels.sass.slice import FREE_INPUTS, GroupShape, Path, Prologue, SliceFacts, condition_of, substitute
from ...kernels.sass.symbolic_solver import Answer, Solver
from ...kernels.sass.symbolic_terms import Term, Terms, evaluate
from .exhaustive import exhaustive_lengths
from .slices import SliceStore
from .verdicts import ConsumerFinding, Witness

__all__ = ["Replay", "examine_image", "examine_images"]

#: Group shapes of every run: CTAs per group and groups; first and last member each.
SHAPES: tuple[tuple[int, int], ...] = ((2, 8), (3, 8), (16, 2), (300, 1))
#: The longer list of ``--exhaustive``: more sizes, one group and eight, first and last group, first, middle and last member.
ALL_SHAPES: tuple[tuple[int, int], ...] = tuple((ctas, groups) for ctas in (2, 3, 4, 5, 7, 8, 16, 37, 300) for groups in (1, 8))

ASSUMPTIONS = (
    "members of a group go through the same rows and read the same length for a row (lengths do not change during a launch)",
    "stride and max_seq_len are any 32-bit words, and the same for all CTAs of a launch",
    "row states are zeroed before the launch, and all CTAs of a group become resident (both audited apart)",
    "threads of a CTA take the branch that thread 0 takes at CTA-wide decisions; what other lanes vote is left open",
)
#: Lengths, max_seq_len and stride to try first: a witness that the launcher can produce says more than the solver's own.
_CANDIDATES: tuple[tuple[int, int, int], ...] = tuple(
    (length & 0xFFFFFFFF, promised, stride)
    for promised, stride in ((16384, 16384), (16384, 65536), (32768, 65536), (65536, 16384), (16384, 16640), (8192, 16384))
    for length in (-1, -2, 32769, 40000, 20000, 65535, -(1 << 31), (1 << 31) - 1)
)

#: Runs a finding's witness: whether it shows the defect (None: could not be run) and what happened, in words.
Replay = Callable[[KernelImage, ConsumerFinding], tuple[bool | None, str]]


def examine_images(
    images: Sequence[KernelImage],
    *,
    store: SliceStore,
    solver: Solver,
    replay: Replay | None = None,
    exhaustive: bool = False,
    clock: Clock = SYSTEM,
) -> list[ConsumerFinding]:
    """Both questions for every image; one call of the disassembler per cubin. Errors become CANNOT TELL with their text."""
    findings: list[ConsumerFinding] = []
    by_cubin: dict[str, list[KernelImage]] = {}
    for image in images:
        by_cubin.setdefault(image.cubin_sha256, []).append(image)
    for group in by_cubin.values():
        kept = {image.function: store.cached(image) for image in group}
        missing = [image for image in group if kept[image.function] is None]
        try:
            store.disassemble(missing)
        except ReproError as error:
            findings.extend(_cannot_tell(image, str(error)) for image in missing)
            group = [image for image in group if kept[image.function] is not None]
        for image in group:
            findings.extend(
                examine_image(
                    image, kept[image.function], store=store, solver=solver, replay=replay, exhaustive=exhaustive, clock=clock
                )
            )
    return findings


def _cannot_tell(image: KernelImage, why: str) -> ConsumerFinding:
    return ConsumerFinding(
        arch=f"sm_{image.sm}",
        top_k=image.top_k,
        vec=image.vec,
        question="agreement",
        word="CANNOT TELL",
        function=image.function,
        why=why,
    )


def examine_image(
    image: KernelImage, facts: SliceFacts | None, *, store: SliceStore, solver: Solver, replay: Replay | None = None,
    exhaustive: bool = False,
    clock: Clock = SYSTEM,
) -> list[ConsumerFinding]:  # fmt: skip
    """``agreement`` and ``bounds`` for one instantiation. ``facts`` None: not in the cache."""
    start = clock.monotonic()
    try:
        try:
            found = _examine(image, facts if facts is not None else store.whole(image), store, solver, exhaustive, facts is None)
        except KeyError:
            if facts is None:
                raise
            found = _examine(image, store.whole(image), store, solver, exhaustive, True)  # trimmed facts of another exploration
    except ReproError as error:
        return [_cannot_tell(image, str(error))]
    except MemoryError as error:
        return [_cannot_tell(image, str(error) or "out of memory")]
    if replay is not None:
        found = [_replayed(image, item, replay) for item in found]
    spent = (clock.monotonic() - start) * 1000
    return [item.model_copy(update={"milliseconds": round(spent / len(found), 1)}) for item in found]


def _replayed(image: KernelImage, finding: ConsumerFinding, replay: Replay) -> ConsumerFinding:
    """The finding with what the machine code did on the witness, run on the CPU ground."""
    if finding.witness is None:
        return finding
    outcome, text = replay(image, finding)
    witness = finding.witness.model_copy(update={"replay": text, "replayed": outcome})
    changed: dict[str, Any] = {"witness": witness}
    if finding.question == "bounds" and finding.word == "CANNOT TELL" and outcome is not None:
        if outcome:
            changed |= {"word": "VULNERABLE", "why": ""}
        else:
            kept = f"{finding.condition} may still hold the length as loaded; the lengths that were run were treated as bounded"
            changed |= {"word": "HOLDS", "why": kept}
    elif finding.question == "agreement" and outcome is False:
        changed |= {"word": "CANNOT TELL", "why": "solver and interpreter disagree: the witness did not deadlock when it was run"}
    return finding.model_copy(update=changed)


def _examine(
    image: KernelImage, facts: SliceFacts, store: SliceStore, solver: Solver, exhaustive: bool, keep: bool
) -> list[ConsumerFinding]:
    if not facts.polls:
        return [
            _cannot_tell(image, "no poll of an arrival counter was found: the barrier of this kernel is not one that is known here")
        ]
    if not facts.heads:
        return [_cannot_tell(image, "no load of a row length was found")]
    prologue = Prologue(facts, layout_for(image.sm, image.params_base, image.params_size), image.top_k, tracing=True)
    agreement = _agreement(image, prologue, solver, exhaustive)
    bounds = _bounds(image, prologue, solver)
    if keep:
        store.keep(image, facts, prologue.touched)
    return [agreement, bounds]


def _common(image: KernelImage) -> dict[str, Any]:
    return {"arch": f"sm_{image.sm}", "top_k": image.top_k, "vec": image.vec, "function": image.function}


def _members(ctas: int, full: bool) -> tuple[int, ...]:
    return tuple(sorted({1, ctas - 1, *((ctas // 2,) if full else ())} - {0}))


def _agreement(image: KernelImage, prologue: Prologue, solver: Solver, exhaustive: bool) -> ConsumerFinding:
    terms = prologue.terms
    asked, pairs = _questions(prologue, exhaustive)
    common = {**_common(image), "question": "agreement", "covered": _covered(pairs, len(asked)), "assumptions": ASSUMPTIONS}
    why = ""
    for waits, gone, shape, shown in asked:
        answer = solver.ask((waits, gone))
        if answer.verdict == "unknown":
            why = why or f"the solver gave up: {answer.reason}"
        elif answer.verdict == "sat":
            hidden = _not_inputs(waits, gone)
            if hidden:
                why = why or f"the decision depends on something that is not modelled: {', '.join(hidden)[:200]}"
                continue
            witness = _witness(image, prologue, waits, gone, shape, shown, answer)
            counted = exhaustive_lengths([(waits, gone)], terms, witness) if exhaustive else None
            return ConsumerFinding(**common, word="VULNERABLE", condition=_shown(waits), witness=witness, exhaustive=counted)
    if why:
        return ConsumerFinding(**common, word="CANNOT TELL", why=why)
    counted = None
    if exhaustive:
        sizes = Witness(length=0, max_seq_len=16384, stride=16384)
        counted = exhaustive_lengths([(waits, gone) for waits, gone, _, _ in asked if not _not_inputs(waits, gone)], terms, sizes)
    return ConsumerFinding(**common, word="PROVED", condition=_shown(asked[0][0]), exhaustive=counted)


_Question = tuple[Any, Any, GroupShape, Path | None]


def _questions(prologue: Prologue, exhaustive: bool) -> tuple[list[_Question], int]:
    """(one CTA waits, another of its group does not come) for every shape, each different pair of conditions once; pairs looked
    at."""
    terms = prologue.terms
    found: dict[tuple[int, int], _Question] = {}
    pairs = 0
    for ctas, groups in ALL_SHAPES if exhaustive else SHAPES:
        for group in sorted({0, groups - 1} if exhaustive else {groups - 1}):
            leader = prologue.first_row(GroupShape(ctas, groups, groups, group, 0))
            waits, alone = condition_of(leader, terms, ("barrier",)), condition_of(leader, terms, ("alone", "exit"))
            shown = next((path for path in leader if path.outcome == "barrier"), None)
            for member in _members(ctas, exhaustive):
                shape = GroupShape(ctas, groups, groups, group, member)
                peer = prologue.first_row(shape)
                prologue.tracing = False  # one shape is enough to show the instructions
                pairs += 1
                gone, comes = condition_of(peer, terms, ("exit", "alone")), condition_of(peer, terms, ("barrier",))
                for one, other in ((waits, gone), (comes, alone)):
                    found.setdefault((id(one), id(other)), (one, other, shape, shown))
    for question in _later_rows(prologue):
        found.setdefault((id(question[0]), id(question[1])), question)
    return list(found.values()), pairs


def _not_inputs(*conditions: Any) -> list[str]:
    """Inputs of the conditions that are not free inputs of the launch: values that the exploration left open."""
    return sorted({name for item in conditions if isinstance(item, Term) for name in item.inputs if name not in FREE_INPUTS})


def _covered(pairs: int, questions: int) -> str:
    return (
        f"{pairs} (leader, member) pairs of group shapes from 2 to 300 CTAs, whose conditions come to {questions} different "
        f"questions; "
        "the first row from the kernel's entry, every later row by induction over the row loop"
    )


def _later_rows(prologue: Prologue) -> list[_Question]:
    """The same questions for any later turn of the row loop: what the loop writes is unknown at its start.

    A member that leaves in a later turn leaves because the rows are used up, as its whole group does: only leaving at entry counts.
    """
    terms = prologue.terms
    shape, other = GroupShape(2, 8, 8, 6, 0), GroupShape(2, 8, 8, 6, 1)

    def later(of: GroupShape, starts: list[Path]) -> list[Path]:
        return [path for start in starts if start.outcome == "loop" for path in prologue.later_row(of, start)]

    entries = prologue.first_row(other, stop_at_loop=True)
    leader = later(shape, prologue.first_row(shape, stop_at_loop=True))
    peer = later(other, entries)
    gone = terms.either(condition_of(entries, terms, ("exit",)), condition_of(peer, terms, ("alone",)))
    waits, comes = condition_of(leader, terms, ("barrier",)), condition_of(peer, terms, ("barrier",))
    return [(waits, gone, other, None), (comes, condition_of(leader, terms, ("alone",)), other, None)]


def _witness(
    image: KernelImage, prologue: Prologue, waits: Any, gone: Any, shape: GroupShape, shown: Path | None, answer: Answer
) -> Witness:
    """An input of the launcher if one of the usual ones is a witness, else the solver's."""
    steps = prologue.relevant(shown) if shown is not None else ()
    for length, promised, stride in _CANDIDATES:
        inputs = {"len": length, "max_seq_len": promised, "stride": stride, "chunk": 8192}
        if not _true(waits, inputs) or not _true(gone, inputs):
            continue
        made = _launch(image, stride, promised)
        if made is not None:
            ctas, groups, text = made
            return Witness(
                length=_signed(length), max_seq_len=promised, stride=stride, ctas_per_group=ctas, groups=groups, rows=8,
                row=min(6, groups - 1),
                launcher=text, instructions=steps,
            )  # fmt: skip
    found = {name: int(answer.inputs.get(name, 0)) for name in ("len", "max_seq_len", "stride")}
    return Witness(
        length=_signed(found["len"]), max_seq_len=found["max_seq_len"], stride=found["stride"], ctas_per_group=shape.ctas,
        groups=shape.groups,
        rows=shape.rows, row=shape.group, launcher="not shown to come from the launcher", instructions=steps,
    )  # fmt: skip


def _launch(image: KernelImage, stride: int, promised: int) -> tuple[int, int, str] | None:
    """Whether the launcher makes groups of several CTAs for 8 rows of this stride on a card of this architecture."""
    try:
        device = device_for_sm(image.sm)
        plan = plan_launch(8, stride, promised, image.top_k, device)
    except ReproError:
        return None
    if plan.path != "persistent" or plan.ctas_per_group < 2:
        return None
    return (
        plan.ctas_per_group,
        plan.groups,
        f"8 rows of {stride} on {device.name}: {plan.groups} groups of {plan.ctas_per_group} CTAs",
    )


def _true(condition: Any, inputs: dict[str, int]) -> bool:
    try:
        return bool(evaluate(condition, inputs))
    except KeyError:
        return False  # depends on something that is not an input: only the solver can say


def _signed(word: int) -> int:
    return word - (1 << 32) if word & 0x80000000 else word


def _shown(condition: Any) -> str:
    text = repr(condition)
    return text if len(text) <= 400 else text[:397] + "..."


def _bounds(image: KernelImage, prologue: Prologue, solver: Solver) -> ConsumerFinding:
    """Is every decision and every value that is read later the same when the length is first clamped to 0 … min(stride,
    max_seq_len)?

    A decision that changes is a row taken for longer than it is. A value that changes without a decision may be one that nobody
    reads: that is VULNERABLE only when the machine code, run on such a length, reads past the row.
    """
    terms = prologue.terms
    length = terms.var("len")
    bound = _smaller(terms, terms.var("stride"), terms.var("max_seq_len"))
    signed = {"len": _smaller(terms, terms.ite(terms.node("slt", length, 0), 0, length), bound)}
    unsigned = {"len": _smaller(terms, length, bound)}
    common = {**_common(image), "question": "bounds", "assumptions": ASSUMPTIONS[:2]}
    covered = "every decision of the first row, and every value that may be read after it, on every path"
    negative = False
    found: list[ConsumerFinding] = []
    for path in prologue.first_row(GroupShape(2, 8, 8, 6, 0)):
        if path.outcome not in ("barrier", "alone"):
            continue
        whole: Any = True
        for item in path.conditions:
            whole = terms.both(whole, item)
        live = prologue.interesting(path.state, path.end)
        answers: list[tuple[Answer, Answer, Any]] = []
        for instead in (signed, unsigned):
            decided = solver.ask((whole, terms.negated(substitute(whole, terms, instead))))
            changed: Any = False
            for _, value in live:
                other = substitute(value, terms, instead)
                same = terms.negated(terms.node("bxor", value, other)) if value.is_bit else terms.node("eq", value, other)
                changed = terms.either(changed, terms.negated(same))
            kept = solver.ask((whole, changed))
            if "unknown" in (decided.verdict, kept.verdict):
                return ConsumerFinding(**common, word="CANNOT TELL", why=f"the solver gave up: {decided.reason or kept.reason}")
            answers.append((decided, kept, changed))
            if decided.verdict == "unsat" and kept.verdict == "unsat":
                break
        if answers[-1][0].verdict == "unsat" and answers[-1][1].verdict == "unsat":
            negative = negative or len(answers) == 2
            continue
        by_decision = all(decided.verdict == "sat" for decided, _, _ in answers)
        plain = next((item for item in answers if item[0].verdict == "unsat"), answers[0])
        differs = terms.negated(substitute(whole, terms, signed)) if by_decision else plain[2]
        hidden = _not_inputs(whole, differs)
        witness = _beyond(image, prologue, path, whole, differs, answers[0][0] if by_decision else plain[1])
        names = ", ".join(name for name, _ in live)
        if by_decision and not hidden:
            found.append(ConsumerFinding(**common, word="VULNERABLE", witness=witness, condition=f"the path to +{path.end:#x}"))
            continue
        why = f"the length as loaded stays in {names} behind +{path.end:#x}; whether it is read was not shown"
        condition = f"{names} at +{path.end:#x}"
        found.append(ConsumerFinding(**common, word="CANNOT TELL", witness=witness, condition=condition, why=why))
    if found:
        return min(
            found, key=lambda item: (item.word != "VULNERABLE", item.witness is None or "not shown" in item.witness.launcher)
        )
    condition = "as if the length were clamped to 0 … min(stride, max_seq_len)"
    if negative:
        condition = (
            "as if the length, read as unsigned, were bounded by min(stride, max_seq_len): a negative length is taken for a "
            "full row"
        )
    return ConsumerFinding(**common, word="PROVED", covered=covered, condition=condition)


def _smaller(terms: Terms, a: Any, b: Any) -> Any:
    return terms.ite(terms.node("ult", a, b), a, b)


def _beyond(image: KernelImage, prologue: Prologue, path: Path, whole: Any, differs: Any, answer: Answer) -> Witness:
    """A witness for a row treated as longer than it is; a positive length where there is one, since no barrier hides it."""
    ordered = sorted(_CANDIDATES, key=lambda item: (item[0] > 0x7FFFFFFF, item[0]))
    for length, promised, stride in ordered:
        inputs = {"len": length, "max_seq_len": promised, "stride": stride, "chunk": 8192}
        if _true(whole, inputs) and _true(differs, inputs):
            made = _launch(image, stride, promised)
            ctas, groups, text = made if made is not None else (2, 8, "")
            return Witness(
                length=_signed(length), max_seq_len=promised, stride=stride, ctas_per_group=ctas, groups=groups, launcher=text,
                instructions=prologue.relevant(path),
            )  # fmt: skip
    found = {name: int(answer.inputs.get(name, 0)) for name in ("len", "max_seq_len", "stride")}
    return Witness(
        length=_signed(found["len"]), max_seq_len=found["max_seq_len"], stride=found["stride"],
        launcher="not shown to come from the launcher",
        instructions=prologue.relevant(path),
    )  # fmt: skip
