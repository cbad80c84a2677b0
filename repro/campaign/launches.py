"""One launch as a case: rows, lengths, width; run on a ground again and again, and what its hang is called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...clock import SYSTEM, Clock
from ...errors import KernelNotFoundError, PlanError, ReproError
from ...kernels.abi import RELEASE_COUNT
from ...kernels.plan import DeviceDescription, LaunchPlan, plan_launch, vector_width
from ...scenarios.drain import DrainPlan
from ...scenarios.drain_steps import DecodeStep
from ..captured import merge_states, standing_counters
from ..ground import Ground, GroundRequest
from ..kernel_choice import ChosenKernel, choose_kernel
from ..prepare import PreparedRun
from .session import trial_ground

__all__ = ["LaunchBench", "LaunchCase", "Seen"]


@dataclass(frozen=True, slots=True)
class LaunchCase:
    """``lengths``: one a row, in candidates, as the kernel reads them. ``width``: candidates in a row (and the row stride).
    ``max_seq_len``: the host scalar; None is the width, as callers from 0.25.0 to 0.30.0 pass it.
    """

    lengths: tuple[int, ...]
    width: int
    top_k: int = 512
    max_seq_len: int | None = None

    @property
    def promised(self) -> int:
        """The host scalar."""
        return self.width if self.max_seq_len is None else self.max_seq_len

    def line(self) -> str:
        """In words."""
        rows = len(self.lengths)
        what = f"{rows} row{'s' if rows != 1 else ''} of {self.width}, lengths {list(self.lengths)}"
        return f"{what}, max_seq_len {self.promised}, k {self.top_k}"


@dataclass(frozen=True, slots=True)
class Seen:
    """How one launch ended: ``hang`` with its identity, ``done``, or anything else with the reason."""

    kind: str
    identity: str | None = None
    why: str = ""


class LaunchBench:
    """Cases of one kernel on one device. ``make``: a new ground."""

    def __init__(
        self,
        kernel: str,
        device: DeviceDescription,
        *,
        ground: str = "cpu",
        ordinal: int = 0,
        options: dict[str, Any] | None = None,
        make: Callable[[str], Ground] = trial_ground,
        clock: Clock = SYSTEM,
    ) -> None:
        self.kernel, self.device, self.ground = kernel, device, ground
        self._ordinal, self._options, self._make, self._clock = ordinal, options or {}, make, clock
        self._chosen: dict[tuple[int, int], ChosenKernel] = {}
        self._known: dict[tuple[str, bool, tuple[int, ...]], str | None] = {}
        self._open: Ground | None = None
        self._at_launch: dict[int, LaunchPlan] | None = None
        self.trials = 0

    def launch(self, case: LaunchCase) -> tuple[ChosenKernel, LaunchPlan]:
        """The kernel instance and the host's launch of a case. PlanError, KernelNotFoundError."""
        vec = vector_width(case.width)
        key = (case.top_k, vec)
        if key not in self._chosen:
            self._chosen[key] = choose_kernel(self.kernel, self.device.sm, case.top_k, vec)
        chosen = self._chosen[key]
        plan = plan_launch(
            len(case.lengths), case.width, case.promised, case.top_k, self.device,
            release_profile=chosen.release, registers=chosen.image.registers, static_smem=chosen.image.static_smem,
        )  # fmt: skip
        return chosen, plan

    def run(self, case: LaunchCase, repeats: int, *, wanted: str | None = None, seed: int = 0) -> list[Seen]:
        """``repeats`` launches, stopped at the first that is no hang (with ``wanted``: of that identity). On the CPU each with
        other logits, in a machine of its own; on a GPU in one process, which goes on to the next case.
        """
        try:
            chosen, plan = self.launch(case)
        except (PlanError, KernelNotFoundError) as error:
            return [Seen("impossible", why=str(error))]
        if plan.path != "persistent":
            return [Seen("impossible", why=plan.refusal or f"the {plan.path} kernel takes these rows")]
        seen: list[Seen] = []
        step = _step(case)
        try:
            for number in range(repeats):
                self.trials += 1
                prepared = self._prepared(case, chosen, plan, step, seed + (number if self.ground == "cpu" else 0))
                ground = self._at(prepared, fresh=self.ground == "cpu")
                one, usable = self._one(ground, prepared, step, plan)
                seen.append(one)
                if not usable:
                    self.close()
                if one.kind != "hang" or (wanted is not None and one.identity != wanted):
                    break
        except ReproError as error:
            self.close()
            seen.append(Seen("other", why=f"{type(error).__name__}: {error}"[:500]))
        return seen

    def diagnosed(self, case: LaunchCase, *, seed: int = 0) -> str | None:
        """The identity of one more hang of the case, from the device's state and not by likeness; None where it does not hang."""
        chosen, plan = self.launch(case)
        step = _step(case)
        self.trials += 1
        self.close()
        try:
            prepared = self._prepared(case, chosen, plan, step, seed)
            ground = self._at(prepared, fresh=True)
            return self._identity(ground, prepared, step) if ground.run_step(step).state == "hung" else None
        finally:
            self.close()

    def close(self) -> None:
        """End the workload that is open; may be called any number of times."""
        ground, self._open, self._at_launch = self._open, None, None
        if ground is not None:
            ground.close()

    def _at(self, prepared: PreparedRun, *, fresh: bool) -> Ground:
        """The open ground with this launch captured; a new one where it must be, or where the open one cannot capture again."""
        launches = dict(prepared.request.launches)
        if self._open is not None and not fresh and self._at_launch == launches:
            return self._open
        again = getattr(self._open, "prepare_again", None)
        if self._open is not None and (fresh or again is None):
            self.close()
        if self._open is None:
            self._open = self._make(self.ground)
            self._open.open(prepared.request, _silent)
        elif again is not None:
            again(prepared.request)
        self._at_launch = launches
        return self._open

    def _prepared(self, case: LaunchCase, chosen: ChosenKernel, plan: LaunchPlan, step: DecodeStep, seed: int) -> PreparedRun:
        options = {"ground": self.ground, "layers": 1, "via": "driver", "dump": self.ground == "gpu", **self._options}
        request = GroundRequest(
            DrainPlan(layers=1, top_k=case.top_k), (step,), chosen.image, {plan.rows: plan},
            device=self._ordinal, seed=seed, options=options,
        )  # fmt: skip
        window = frozenset({0}) if plan.wedges_on_negative_length and min(case.lengths) < 0 else frozenset[int]()
        return PreparedRun(request, chosen, self.device, window, "", 1)

    def _one(self, ground: Ground, prepared: PreparedRun, step: DecodeStep, plan: LaunchPlan) -> tuple[Seen, bool]:
        """(what was seen, whether the ground may be used again)."""
        outcome = ground.run_step(step)
        if outcome.state == "done":
            return Seen("done"), self.ground != "cpu"
        if outcome.state != "hung":
            return Seen(outcome.state, why="; ".join(outcome.reasons)[:500]), outcome.state == "wrong" and self.ground != "cpu"
        if self.ground == "cpu":
            return Seen("hang", self._identity(ground, prepared, step)), False
        # On a GPU the debugger costs the context: the first hang of its kind is diagnosed; others with the same kernel and the same
        # standing counters count as like it, are released, and the process goes on.
        standing = self._standing(ground, plan)
        if not standing:
            return Seen("other", why="no counter stands in the middle of a barrier: slow, or another kind of hang"), False
        sign = (prepared.chosen.image.cubin_sha256, plan.peers_leave, tuple(sorted({count for _, count in standing})))
        if sign not in self._known:
            self._known[sign] = self._identity(ground, prepared, step)
            return Seen("hang", self._known[sign]), False
        return Seen("hang", self._known[sign]), ground.unwedge(standing[0][0], RELEASE_COUNT).retired

    @staticmethod
    def _standing(ground: Ground, plan: LaunchPlan) -> list[tuple[int, int]]:
        """The counters that stand in the middle of a barrier, the same at two looks; [] where they are not so."""
        reader = getattr(ground, "row_states", None)
        if reader is None:
            return []
        first, again = reader(), reader()
        found = standing_counters(again, plan.ctas_per_group)
        return found if standing_counters(first, plan.ctas_per_group) == found else []

    def _identity(self, ground: Ground, prepared: PreparedRun, step: DecodeStep) -> str | None:
        from ...forensics.diagnose import diagnose_state

        with tempfile.TemporaryDirectory(prefix="dsv4-minimise-") as name:
            captures = ground.capture(Path(name), _silent, allow_dump=self.ground != "cpu", attach=True)
            state = merge_states(captures)
            if state is None:
                return None
            return diagnose_state(state, ground=cast("Any", self.ground), step=None, evidence=(), unwedge=None).verdict.identity


def _silent(*_words: Any, **_fields: Any) -> None:
    """Nobody listens to single launches."""


def _step(case: LaunchCase) -> DecodeStep:
    """The launch as a step of no plan: every row is somebody's."""
    rows = len(case.lengths)
    return DecodeStep(
        index=0, live_requests=rows, next_n=1, rows=rows, graph_rows=rows, padded_requests=0,
        query_start_loc=tuple(range(rows + 1)), seq_lens=tuple(max(length, 0) for length in case.lengths), decode_lens=(1,) * rows,
        expanded=case.lengths, lengths=case.lengths, finished=(), danger=min(case.lengths) < 0, path="native",
        requests=tuple(range(rows)), total_live=rows,
    )  # fmt: skip
