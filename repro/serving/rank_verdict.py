"""What each rank of a hung server was doing, by its own evidence: held by a barrier, waiting for a peer, idle, ended, not read.

A rank whose kernel polls another GPU's flag, or stands in a collective, waits for a peer: it is a victim as long as another rank is
held by something of its own. The judging of one device state is ``forensics.diagnose``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...forensics.chain import StepFacts
from ...forensics.device_state import DeviceState, Unread
from ...forensics.diagnose import diagnose_state
from ...forensics.evidence.device_text import family_of
from ...forensics.identity import base_name, readable_name
from ...forensics.records import Diagnosis, Evidence, Wait
from ..captured import all_unread, merge_states
from ..ground import CaptureOutcome
from .measured_step import KnownWait, agent_launches, device_of, known_wait, measured_step, with_parameters
from .records import Rank

__all__ = ["RankVerdict", "Role", "judge_rank", "rank_name"]

Role = Literal["held", "waits for a peer", "stuck", "at work", "idle", "ended", "not read"]

#: Classes of a rank that is held by something of its own, whatever its peers do.
_OWN = ("gpu-spin-barrier", "gpu-barrier-intra-block", "gpu-fault")


@dataclass(frozen=True)
class RankVerdict:
    """One rank. ``diagnosis``: of its own device state, None if none was seen; ``known``: the wait told from row states alone.

    ``kernels``: names of what is resident. ``step``: the decode step. ``recovered``: what moved again during the capture.
    """

    rank: Rank
    role: Role
    diagnosis: Diagnosis | None = None
    known: KnownWait | None = None
    waits: tuple[Wait, ...] = ()
    kernels: tuple[str, ...] = ()
    step: StepFacts | None = None
    recovered: str = ""
    notes: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = field(default=())

    @property
    def name(self) -> str:
        """``rank 1`` or, where that is not known, ``process 816``."""
        return rank_name(self.rank)

    @property
    def key(self) -> tuple[str | None, ...]:
        """Equal for ranks that are held by the same: class and cause, and the identity where the device was seen."""
        if self.diagnosis is None:
            return ("gpu-spin-barrier", "peer-left", None)
        verdict = self.diagnosis.verdict
        return (verdict.class_, verdict.cause, verdict.identity)


def judge_rank(
    rank: Rank,
    captures: Sequence[CaptureOutcome],
    *,
    hung: bool,
    evidence: Sequence[Evidence] = (),
    ring: Mapping[str, Any] | None = None,
    names: Mapping[str, Any] | None = None,
    planned: StepFacts | None = None,
    host: str = "",
    unwedge: Any = None,
) -> RankVerdict:
    """``captures``: this rank's own outcomes. ``ring``: its recorder's facts; ``names``: the cards by NVML index; ``evidence``: its
    files as the run names them."""
    unread = all_unread(captures)
    asked = next((capture.facts for capture in captures if capture.collector == "agent_row_states"), {})
    launches = agent_launches(asked)
    step = measured_step(ring, launches, planned)
    recovered = next((item.why.partition("it recovered: ")[2] for item in unread if "it recovered: " in item.why), "")
    ended = any(item.why.startswith(("the process has ended", "the process ended under")) for item in unread)
    common: dict[str, Any] = {"step": step, "recovered": recovered, "unread": unread}
    state = merge_states(captures)
    wait = known_wait(asked) if hung else None
    if state is not None and state.grids:
        filled, from_agent = with_parameters(state, launches)
        notes = ("kernel parameters are from the agent's record of the captured launch",) if from_agent else ()
        diagnosis = diagnose_state(filled, ground="server", step=step, evidence=evidence, hung=hung, host=host, unwedge=unwedge)
        kernels = tuple(dict.fromkeys(readable_name(grid.kernel) for grid in filled.grids if grid.ctas is None or grid.ctas))
        role = _role(diagnosis, filled)
        ours = any(base_name(grid.kernel) == "persistent_topk_kernel" for grid in filled.grids)
        if wait is None or role == "held" or not ours:
            return RankVerdict(rank, role, diagnosis, waits=diagnosis.waits, kernels=kernels, notes=notes, **common)
        # The debugger shows the kernel and not where its blocks stand; the counters that the agent read say what they wait for.
        notes = (f"{rank_name(rank)}: the debugger showed {', '.join(kernels)} and no wait; row states told it",)
        return RankVerdict(rank, "held", known=wait, waits=_waits(wait, step, names, rank), kernels=kernels, notes=notes, **common)
    if wait is not None:
        return RankVerdict(rank, "held", known=wait, waits=_waits(wait, step, names, rank), **common)
    if ended:
        return RankVerdict(rank, "ended", **common)
    nothing = any(item.what == "cuda-gdb kernels" for item in unread)
    return RankVerdict(rank, "idle" if nothing else "not read", **common)


def _role(diagnosis: Diagnosis, state: DeviceState) -> Role:
    # A flag of another GPU may be polled by a load of any scope: a communication library's kernel is never the one to blame.
    polled = {family_of(wait.kernel) for wait in diagnosis.waits}
    if diagnosis.verdict.class_ in _OWN:
        return "waits for a peer" if polled and polled <= {"nccl", "crossrank"} else "held"
    resident = [grid for grid in state.grids if grid.ctas is None or grid.ctas]
    if not resident:
        return "idle"
    candidates = (diagnosis.model_extra or {}).get("candidates", [])
    outside = {"gpu-crossrank-spin", "collective-desync", "collective-stuck"} & {diagnosis.verdict.class_, *candidates}
    if outside or all(family_of(grid.kernel) in ("nccl", "crossrank") for grid in resident):
        return "waits for a peer"
    return "at work" if diagnosis.verdict.class_ == "unknown" else "stuck"


def rank_name(rank: Rank) -> str:
    """``rank 1`` or, where that is not known, ``process 816``."""
    return f"rank {rank.rank}" if rank.rank is not None else f"process {rank.pid}"


def _waits(known: KnownWait, step: StepFacts | None, names: Mapping[str, Any] | None, rank: Rank) -> tuple[Wait, ...]:
    """The wait as far as memory tells it: value and address read, target and block by the launcher's arithmetic.

    Empty where the card is not known: then the group's size is not, either.
    """
    rows = step.graph_rows if step is not None and step.origin == "measured" else None
    plan = known.launch.plan(device_of(names or {}, rank.gpu_index), rows)
    if plan is None:
        return ()
    ctas = plan.ctas_per_group
    wait = Wait.model_validate({
        "kernel": "persistent_topk_kernel", "grid": (plan.grid, 1, 1), "block": (known.group * ctas, 0, 0),
        "address": hex(known.address), "value": 1, "target": ctas, "comparison": ">=", "state_field": "arrival_counter",
        "group": known.group, "role": "leader", "address_status": "measured", "value_status": "measured",
        "target_status": "computed", "block_status": "inferred", "live_value": 1,
    })  # fmt: skip
    return (wait,)
