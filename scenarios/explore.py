"""Every order of execution of a small launch, over an abstract model of its barrier: ends, deadlocks by name, shortest way there.

The model keeps what decides whether anybody waits for ever: which CTAs have started, how far each is, and each group's counter.
Data, registers and time are left out, so it is checked against the interpreter (the same launch, instruction by instruction, must
end in one of the ends found here), and a build whose decisions depend on racing data is given both choices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import BudgetError, UsageError
from ..kernels.abi import RADIX_THRESHOLD
from .launches import Launch

__all__ = ["Captured", "End", "Explored", "Model", "explore", "model_of", "place"]

#: States that are looked at before the exploration gives up.
DEFAULT_STATES = 400_000
_ROUNDS = 6

#: What a CTA does next at its group's counter: add an arrival, wait for a count, write zero, or leave early if it likes.
Step = tuple[Literal["arrive", "wait", "zero", "may-leave"], int]
#: Position in its program of each CTA (-1: not started, length of the program: it has left), and the counter of each group.
State = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Model:
    """``programs``: of each block, by blockIdx.x. ``ctas``: of a group. ``slots``: CTAs that can be resident. ``counters``: at the
    start, of each group.
    """

    programs: tuple[tuple[Step, ...], ...]
    ctas: int
    slots: int
    counters: tuple[int, ...]
    note: str = ""

    def group(self, block: int) -> int:
        return block // self.ctas

    def start(self) -> State:
        """Nobody has started."""
        return (-1,) * len(self.programs), self.counters


@dataclass(frozen=True, slots=True)
class End:
    """One kind of end: ``completed``, or a deadlock by the word of its cause. ``state`` and ``path``: of the shortest way there."""

    name: str
    state: State
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explored:
    """All that can be reached. ``ends``: one of each kind, shortest first. ``final``: every final state."""

    model: Model
    states: int
    ends: tuple[End, ...]
    final: frozenset[State] = field(default=frozenset(), repr=False)

    @property
    def deadlocks(self) -> tuple[End, ...]:
        return tuple(end for end in self.ends if end.name != "completed")

    def lines(self) -> list[str]:
        """What a person reads: the count, the ends, the shortest counterexample."""
        words = ", ".join(end.name for end in self.ends)
        lines = [f"explored: {self.states} states, every order of execution; ends: {words}"]
        lines += [f"shortest way to {end.name}, {len(end.path)} steps: {' · '.join(end.path)}" for end in self.deadlocks]
        return [*lines, self.model.note] if self.model.note else lines


def model_of(launch: Launch, variant: str) -> Model:
    """The model of a launch of the builtin kernel's build ``variant``. UsageError for a launch too large to explore."""
    case = launch.case
    if case.grid > 8 or len(case.lengths) > 8:
        raise UsageError(f"{case.grid} CTAs and {len(case.lengths)} rows: at most 8 of each are explored exhaustively")
    guarded = variant != "unguarded"
    programs = []
    for block in range(case.grid):
        group, member = divmod(block, case.ctas_per_group)
        leader = member == 0
        steps: list[Step] = []
        if leader or case.max_seq_len > RADIX_THRESHOLD:
            if variant == "init-race" and leader:
                steps.append(("zero", 0))
            phase = 0
            for row in range(group, len(case.lengths), case.groups):
                if _together(case.lengths[row], guarded, min(case.stride, case.max_seq_len)):
                    for number in range(_ROUNDS):
                        steps += [("arrive", 0), ("wait", (phase + 1) * case.ctas_per_group)]
                        phase += 1
                        if variant in ("early-arrival", "missing-fence") and 0 < number < _ROUNDS - 1:
                            steps.append(("may-leave", 0))
            if variant == "reset-race" and leader and phase:
                steps.append(("zero", 0))
        programs.append(tuple(steps))
    slots = launch.resident or case.grid
    note = (
        "" if variant not in ("early-arrival", "missing-fence") else "members whose data race may end their rounds at any of them"
    )
    return Model(tuple(programs), case.ctas_per_group, slots, (launch.counter,) * case.groups, note)


def _together(length: int, guarded: bool, bound: int) -> bool:
    """Whether a row is shared by its group, as the build decides."""
    return (min(max(length, 0), bound) if guarded else length & 0xFFFFFFFF) > RADIX_THRESHOLD


def explore(model: Model, *, limit: int = DEFAULT_STATES) -> Explored:
    """Every state that can be reached, breadth first. BudgetError if there are more than ``limit``."""
    start = model.start()
    before: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    ends: dict[str, End] = {}
    final = set()
    while queue:
        state = queue.popleft()
        following = _successors(model, state)
        if not following:
            final.add(state)
            name = _name(model, state)
            if name not in ends:
                ends[name] = End(name, state, _path(before, state))
        for text, after in following:
            if after not in before:
                if len(before) >= limit:
                    raise BudgetError(f"more than {limit} states: too large to explore exhaustively")
                before[after] = (state, text)
                queue.append(after)
    return Explored(model, len(before), tuple(ends.values()), frozenset(final))


def _path(before: Mapping[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    words: list[str] = []
    here = before[state]
    while here is not None:
        state, text = here
        words.append(text)
        here = before[state]
    return tuple(reversed(words))


def _successors(model: Model, state: State) -> list[tuple[str, State]]:
    places, counters = state
    found = []
    resident = sum(0 <= place < len(model.programs[block]) for block, place in enumerate(places))
    waiting = next((block for block, place in enumerate(places) if place < 0), None)
    if waiting is not None and resident < model.slots:
        found.append((f"block {waiting} starts", (_moved(places, waiting, 0), counters)))
    for block, place in enumerate(places):
        program = model.programs[block]
        if not 0 <= place < len(program):
            continue
        what, number = program[place]
        group = model.group(block)
        value = counters[group]
        on = _moved(places, block, place + 1)
        if what == "arrive":
            found.append((f"block {block} arrives ({value + 1})", (on, _moved(counters, group, value + 1))))
        elif what == "zero":
            found.append((f"block {block} writes 0", (on, _moved(counters, group, 0))))
        elif what == "may-leave":
            found.append((f"block {block} goes on", (on, counters)))
            found.append((f"block {block} leaves its rounds", (_moved(places, block, len(program)), counters)))
        elif value >= number:
            found.append((f"block {block} sees {value} >= {number}", (on, counters)))
    return found


def _moved(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _arrivals(model: Model, block: int, place: int) -> int:
    return sum(what == "arrive" for what, _ in model.programs[block][: max(place, 0)])


def _name(model: Model, state: State) -> str:
    """``completed``, or the cause of the deadlock by the arithmetic of its counter, as the rules over a device state have it."""
    places, counters = state
    if all(place == len(program) for place, program in zip(places, model.programs, strict=True)):
        return "completed"
    for group, value in enumerate(counters):
        members = range(group * model.ctas, (group + 1) * model.ctas)
        stuck = [block for block in members if 0 <= places[block] < len(model.programs[block])]
        if not stuck:
            continue
        if any(places[block] < 0 for block in members):
            return "not-co-resident"
        own = sum(_arrivals(model, block, places[block]) for block in stuck)
        if value < own:
            return "init-race" if len(stuck) == model.ctas else "reset-race"
        return "peer-left" if value == own else "missing-fence"
    return "not-co-resident"


# ---------------------------------------------------------------------------------------------------------------------------------
# A captured state among those that can be reached


@dataclass(frozen=True, slots=True)
class Captured:
    """What a device state shows of a launch: blocks ``spinning`` (and the count each waits for), ``exited``, ``never_started``;
    and each group's counter, None where it was not read.
    """

    spinning: Mapping[int, int]
    exited: Sequence[int] = ()
    never_started: Sequence[int] = ()
    counters: tuple[int | None, ...] = ()


def place(explored: Explored, captured: Captured, *, limit: int = DEFAULT_STATES) -> str:
    """Where a captured state stands among the reachable ones: ``no successor``, ``goes on``, or ``not reachable`` in the model."""
    model = explored.model
    if any(_matches(model, state, captured) for state in explored.final):
        return "no successor"
    seen = {model.start()}
    queue = deque(seen)
    while queue:
        state = queue.popleft()
        if _matches(model, state, captured):
            return "goes on"
        for _, after in _successors(model, state):
            if after not in seen and len(seen) < limit:
                seen.add(after)
                queue.append(after)
    return "not reachable"


def _matches(model: Model, state: State, captured: Captured) -> bool:
    places, counters = state
    for group, value in enumerate(captured.counters):
        if value is not None and counters[group] != value:
            return False
    for block, where in enumerate(places):
        program = model.programs[block]
        if block in captured.spinning:
            if not 0 <= where < len(program) or program[where] != ("wait", captured.spinning[block]):
                return False
        elif block in captured.exited:
            if where != len(program):
                return False
        elif block in captured.never_started and where >= 0:
            return False
    return True
