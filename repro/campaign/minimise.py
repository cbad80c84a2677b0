"""``minimise RUN``: the smallest drain plan, then the smallest single launch, that still hang with the same identity.

A candidate is kept only when all of ``confirm`` repetitions hang with the run's own identity - on the CPU each of them is a proof,
elsewhere n of n says how likely a hang is at least (exact bound, told in the result). A candidate of which one repetition does not
hang so is dropped. The order: fields of the plan, then of its step the rows (delta debugging), the lengths, the width, the rest of
the launch; the launch is gone through again until nothing can go.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import BudgetError, InconclusiveError, PlanError, RunStoreError, UsageError
from ...kernels.plan import DeviceDescription
from ...scenarios.drain import DrainPlan
from ..atomic import make_folder, write_atomic
from ..bounds import at_least
from ..console import Screen
from ..grounds import require_card
from ..runread import RunView, open_run
from .cells import Cell
from .launches import LaunchBench, LaunchCase
from .reproducer import write_reproducer
from .sequential import CONFIDENCE
from .session import TrialSession, device_of
from .shrink import Account, ddmin, smallest

if TYPE_CHECKING:
    from ..options import Common

__all__ = [
    "MINIMISE_SCHEMA",
    "Minimised",
    "Sessions",
    "cell_of_run",
    "minimise_case",
    "minimise_cell",
    "minimise_plan",
    "run_minimise",
]

MINIMISE_SCHEMA = "dsv4-repro/minimise/1"


@dataclass(slots=True)
class Minimised:
    """What is left. ``plan``: the smallest drain plan as a cell; ``case``: the smallest launch; ``confirm``: n of n hung."""

    identity: str
    confirm: int
    cell: Cell
    seed: int
    case: LaunchCase
    launch: dict[str, Any]
    account: Account = field(default_factory=Account)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schema": MINIMISE_SCHEMA,
            "outcome": "hang",
            "identity": self.identity,
            "confidence": {"hung": f"{self.confirm} of {self.confirm}", "hazard_at_least": self.hazard, "at": CONFIDENCE},
            "plan": self.cell.drain(self.seed).document(),
            "cell": self.cell.document(),
            "command": list(self.cell.command(self.seed)),
            "case": {
                "lengths": list(self.case.lengths),
                "width": self.case.width,
                "max_seq_len": self.case.promised,
                "top_k": self.case.top_k,
            },
            "launch": self.launch,
            "candidates": self.account.candidates,
            "kept": self.account.kept,
            "trials": self.account.trials,
            "steps": self.account.lines,
        }

    @property
    def hazard(self) -> float:
        """Chance of a hang per launch, at least, at ``CONFIDENCE``."""
        return at_least(self.confirm, self.confirm, CONFIDENCE)


def cell_of_run(view: RunView, *, on: str | None = None) -> Cell:
    """The workload of a run directory as a cell. RunStoreError if it is not a drain or names no kernel."""
    run = view.run
    if run.scenario != "drain" or run.kernel is None:
        raise RunStoreError(
            f"a run of {run.scenario!r} cannot be minimised: it has no drain plan and kernel",
            path=str(view.path), help_text="minimise takes a run directory of: dsv4-repro run drain",
        )  # fmt: skip
    words = _flags_of(run.command)
    plan = {name: value for name, value in run.plan.items() if name not in ("schema", "seed")}
    ground = on or run.ground
    try:
        number: dict[str, Any] = {
            name: int(words[flag]) for name, flag in (("sms", "--sms"), ("slots_per_sm", "--slots-per-sm")) if flag in words
        }
    except ValueError:
        raise RunStoreError("its command has no number after --sms or --slots-per-sm", path=str(view.path)) from None
    return Cell(
        name="run", ground=ground, kernel=run.kernel.origin, producer=words.get("--producer", "raw"), plan=plan,
        arch=run.kernel.sm if ground == "cpu" else None, device=words.get("--device") if ground == run.ground else None,
        schedule=words.get("--schedule", "smallest-pc"), share="--share" in run.command, **number,
    )  # fmt: skip


def _flags_of(command: tuple[str, ...]) -> dict[str, str]:
    return {word: command[place + 1] for place, word in enumerate(command[:-1]) if word.startswith("--")}


# -- the plan --------------------------------------------------------------------------------------------------------------------


def _smaller(plan: DrainPlan) -> Iterator[tuple[str, Any]]:
    """(field, value) candidates, the smallest of a field first."""
    yield "layers", 1
    yield "dp", 1
    yield "min_live", 1
    for field_name, least in (("requests", plan.min_live), ("steps", 1)):
        value, now = least, getattr(plan, field_name)
        while value < now:  # every number up to 16, then doubling
            yield field_name, value
            value = value + 1 if value < 16 else value * 2
    for field_name in ("output", "prompt"):
        yield field_name, (1, 1)
    yield "acceptance", 1.0
    yield "mtp", 1
    yield "max_num_seqs", plan.min_live
    if plan.capture_sizes is not None and len(plan.capture_sizes) > 1:
        for size in plan.capture_sizes:
            yield "capture_sizes", (size,)
    yield "max_model_len", 65536


class Sessions:
    """Trial sessions for candidates. On a GPU a process and a debugger for each would take a quarter of a minute: there one process
    is used on, and hangs are matched by kernel and counters with the first, which is diagnosed in full (the smallest launch is
    diagnosed again). ``make``: a new session.
    """

    def __init__(self, make: Callable[..., TrialSession]) -> None:
        self._make = make
        self._identities: dict[str, Any] = {}
        self._kept: TrialSession | None = None

    @contextlib.contextmanager
    def at(self, cell: Cell) -> Iterator[TrialSession]:
        """A session for the cell, for as long as the block lasts."""
        if cell.ground == "gpu":
            if self._kept is None:
                self._kept = self._make(cell, identities=self._identities, coarse=True)
            else:
                self._kept.rebind(cell)
            yield self._kept
            return
        one = self._make(cell, identities=self._identities)
        try:
            yield one
        finally:
            one.close()

    def close(self) -> None:
        """End the process that was used on."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def minimise_plan(
    cell: Cell, seed: int, identity: str, confirm: int, account: Account, *, deadline: Deadline, sessions: Sessions
) -> Cell:
    """The cell with every field of its plan as small as the hang allows."""

    def hangs(candidate: Cell) -> bool:
        account.candidates += 1
        with sessions.at(candidate) as one:
            for _ in range(confirm):
                if deadline.expired:
                    raise BudgetError("the time given with --timeout was up before nothing more could go")
                account.trials += 1
                result = one.trial(seed)
                if result.kind != "hang" or result.identity != identity:
                    return False
            return True

    if not hangs(cell):
        raise InconclusiveError(f"the run's plan does not hang {confirm} of {confirm} times with identity {identity} here")
    changed = True
    while changed:
        changed = False
        for name, value in _smaller(cell.drain(seed)):
            plan = cell.drain(seed)
            now = getattr(plan, name)
            if now == value or (isinstance(value, int) and isinstance(now, int) and value > now):
                continue
            candidate = replace(cell, plan={**cell.plan, name: list(value) if isinstance(value, tuple) else value})
            try:
                candidate.drain(seed)
            except PlanError:
                continue
            if hangs(candidate):
                account.note(f"plan: {name} {now} -> {value}")
                cell, changed = candidate, True
                break
    return cell


# -- the launch ------------------------------------------------------------------------------------------------------------------


def minimise_case(
    bench: LaunchBench, case: LaunchCase, identity: str, confirm: int, account: Account, *, deadline: Deadline
) -> LaunchCase:
    """The smallest launch: rows, lengths, width, k. InconclusiveError if the first one does not hang so."""
    tried: dict[LaunchCase, bool] = {}

    def hangs(candidate: LaunchCase) -> bool:
        if candidate not in tried:
            if deadline.expired:
                raise BudgetError("the time given with --timeout was up before nothing more could go")
            account.candidates += 1
            before = bench.trials
            seen = bench.run(candidate, confirm, wanted=identity)
            account.trials += bench.trials - before
            tried[candidate] = len(seen) == confirm and all(one.kind == "hang" and one.identity == identity for one in seen)
        return tried[candidate]

    if not hangs(case):
        raise InconclusiveError(
            f"the launch alone ({case.line()}) does not hang {confirm} of {confirm} times with identity {identity}"
        )
    while True:
        start = case
        rows = ddmin(list(case.lengths), partial(_rows_hang, hangs, case))
        case = _kept(case, replace(case, lengths=tuple(rows)), "rows", account)
        case = _simpler_lengths(case, hangs, account)
        width = smallest(case.width, partial(_width_hangs, hangs, case))
        case = _kept(case, _of_width(case, width), "width", account)
        if case.top_k != 512 and hangs(replace(case, top_k=512)):
            case = _kept(case, replace(case, top_k=512), "k", account)
        if case.max_seq_len is not None and hangs(replace(case, max_seq_len=None)):
            case = _kept(case, replace(case, max_seq_len=None), "max_seq_len", account)
        if case == start:
            return case


def _rows_hang(hangs: Callable[[LaunchCase], bool], case: LaunchCase, lengths: list[int]) -> bool:
    return hangs(replace(case, lengths=tuple(lengths)))


def _width_hangs(hangs: Callable[[LaunchCase], bool], case: LaunchCase, width: int) -> bool:
    return hangs(_of_width(case, width))


def _of_width(case: LaunchCase, width: int) -> LaunchCase:
    """Narrower rows; lengths inside a row stay inside it."""
    lengths = tuple(min(length, width) if 0 <= length <= case.width else length for length in case.lengths)
    return replace(case, width=width, lengths=lengths)


def _simpler_lengths(case: LaunchCase, hangs: Callable[[LaunchCase], bool], account: Account) -> LaunchCase:
    for place, length in enumerate(case.lengths):
        for simple in (0, 1, -1):
            if simple == length:
                break  # as simple as it can be: those before were tried
            lengths = (*case.lengths[:place], simple, *case.lengths[place + 1 :])
            if hangs(replace(case, lengths=lengths)):
                case = _kept(case, replace(case, lengths=lengths), f"length of row {place}", account)
                break
    return case


def _kept(before: LaunchCase, after: LaunchCase, what: str, account: Account) -> LaunchCase:
    if after != before:
        account.note(f"launch: {what}: {after.line()}")
    return after


# -- both ------------------------------------------------------------------------------------------------------------------------


def minimise_cell(
    cell: Cell,
    seed: int,
    *,
    identity: str | None = None,
    confirm: int = 5,
    timeout_s: float | None = None,
    note: Callable[[str], None] = lambda _text: None,
    session: Callable[..., TrialSession] = TrialSession,
    bench: Callable[[Cell, DeviceDescription, int], LaunchBench] | None = None,
    clock: Clock = SYSTEM,
) -> Minimised:
    """Plan and launch of a cell that hangs. InconclusiveError where it does not, or not with ``identity``."""
    deadline = Deadline(timeout_s if timeout_s is not None else float("inf"), clock)
    sessions = Sessions(session)
    try:
        with sessions.at(cell) as first:
            result = first.trial(seed)
        if result.kind != "hang" or result.identity is None:
            raise InconclusiveError(f"the run does not hang here: {result.kind} {result.why}".strip()[:500])
        if identity is not None and result.identity != identity:
            raise InconclusiveError(f"it hangs here with identity {result.identity}, the run's was {identity}: not the same hang")
        account = Account()
        note("shrinking the plan")
        cell = minimise_plan(cell, seed, result.identity, confirm, account, deadline=deadline, sessions=sessions)
        note("shrinking the launch")
        case = _case_of(cell, seed, sessions)
    finally:
        sessions.close()
    device, ordinal = device_of(cell)
    options = {name: value for name in ("sms", "slots_per_sm") if (value := getattr(cell, name)) is not None}
    options |= {"share": cell.share, "schedule": cell.schedule}
    made = (
        bench(cell, device, ordinal)
        if bench is not None
        else LaunchBench(cell.kernel, device, ground=cell.ground, ordinal=ordinal, options=options, clock=clock)
    )
    try:
        case = minimise_case(made, case, result.identity, confirm, account, deadline=deadline)
        again = made.diagnosed(case)
    finally:
        made.close()
    if again != result.identity:
        raise InconclusiveError(
            f"the smallest launch ({case.line()}) was diagnosed in full at the end: identity {again or 'not known'}, wanted "
            f"{result.identity}"
        )
    _chosen, plan = made.launch(case)
    launch = {
        "grid": plan.grid, "groups": plan.groups, "ctas_per_group": plan.ctas_per_group, "chunk_size": plan.chunk_size,
        "dynamic_smem": plan.dynamic_smem, "vec": plan.vec, "device": device.name, "sm": device.sm,
    }  # fmt: skip
    return Minimised(result.identity, confirm, cell, seed, case, launch, account)


def _case_of(cell: Cell, seed: int, sessions: Sessions) -> LaunchCase:
    """The step of the plan that hangs, as one launch."""
    with sessions.at(cell) as one:
        result = one.trial(seed)
        prepared = one.prepare(seed)
    step = next((step for step in prepared.request.steps if step.index == result.hung_step), None)
    if result.kind != "hang" or step is None:
        raise InconclusiveError(f"the smallest plan did not hang when it was run once more: {result.kind} {result.why}"[:500])
    launch = prepared.request.launches[step.graph_rows]
    promised = None if launch.max_seq_len == launch.stride else launch.max_seq_len
    return LaunchCase(step.lengths, launch.stride, launch.top_k, promised)


def run_minimise(target: Path, common: Common, *, on: str | None = None, confirm: int = 5, clock: Clock = SYSTEM) -> int:
    """The verb: 3 with the smallest reproducer written, 5 where the hang is not seen again."""
    if on not in (None, "cpu", "gpu"):
        raise UsageError(f"--on {str(on)[:40]}: minimise runs on gpu or cpu")
    screen = Screen(as_json=common.as_json, clock=clock)
    view = open_run(target)
    cell = cell_of_run(view, on=on)
    if cell.ground == "gpu":
        from ..machine import probe_machine

        require_card(probe_machine(version=lambda _argv: None).gpus)
    out = common.out or target / "minimised"
    make_folder(out)
    known = view.diagnosis.verdict.identity if view.diagnosis is not None else None
    screen.tell([f"minimise {target}: {cell.kernel} on {cell.ground}, each candidate {confirm} of {confirm}"])
    done = minimise_cell(
        cell, common.seed if common.seed is not None else view.run.seed, identity=known, confirm=confirm, timeout_s=common.timeout,
        note=screen.progress, clock=clock,
    )  # fmt: skip
    path = write_reproducer(out / "reproducer.py", done)
    document = {**done.document(), "reproducer": str(path), "exit_status": 3}
    write_atomic(out / "minimised.json", (json.dumps(document, indent=2) + "\n").encode(), mode=0o644)
    screen.end_progress()
    screen.tell(
        [
            *done.account.lines,
            f"HANG {done.identity}: {done.case.line()}: grid {done.launch['grid']}, {done.launch['ctas_per_group']} CTAs a group",
            f"{done.confirm} of {done.confirm}: a launch hangs with a chance of at least {done.hazard:.3f} at "
            f"{CONFIDENCE * 100:g} %; {done.account.candidates} candidates, {done.account.trials} trials",
            f"smallest plan: {' '.join(done.cell.command(done.seed))}",
            f"reproducer: {path}",
        ]
    )
    screen.document(document)
    return 3
