"""One launch as a case: rows, lengths, width; run on a ground again and again, and what its hang is called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ...clock import SYSTEM, Clock
from ...errors import KernelNotFoundError, PlanError, ReproError
from ...kernels.abi import RELEASE_COUNT
from ...kernels.plan import DeviceDescription, LaunchPlan, plan_launch, vector_width
from ...scenarios.drain import DecodeStep, DrainPlan
from ..captured import merge_states, standing_counter
from ..ground import Ground, GroundRequest
from ..grounds import make_ground
from ..kernel_choice import ChosenKernel, choose_kernel
from ..prepare import PreparedRun

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
        make: Callable[[str], Ground] = make_ground,
        clock: Clock = SYSTEM,
    ) -> None:
        self.kernel, self.device, self.ground = kernel, device, ground
        self._ordinal, self._options, self._make, self._clock = ordinal, options or {}, make, clock
        self._chosen: dict[tuple[int, int], ChosenKernel] = {}
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
        """``repeats`` launches with different logits, stopped at the first that is no hang (with ``wanted``: of that identity)."""
        try:
            chosen, plan = self.launch(case)
        except (PlanError, KernelNotFoundError) as error:
            return [Seen("impossible", why=str(error))]
        if plan.path != "persistent":
            return [Seen("impossible", why=plan.refusal or f"the {plan.path} kernel takes these rows")]
        seen: list[Seen] = []
        ground: Ground | None = None
        step = _step(case)
        try:
            for number in range(repeats):
                self.trials += 1
                if ground is None or self.ground == "cpu":
                    if ground is not None:
                        ground.close()
                    ground = self._make(self.ground)
                    prepared = self._prepared(case, chosen, plan, step, seed + number)
                    ground.open(prepared.request, _silent)
                one, usable = self._one(ground, prepared, step, plan, first=number == 0)
                seen.append(one if one.identity or one.kind != "hang" or not seen else replace(one, identity=seen[0].identity))
                if not usable:
                    ground.close()
                    ground = None
                if seen[-1].kind != "hang" or (wanted is not None and seen[-1].identity != wanted):
                    break
        except ReproError as error:
            seen.append(Seen("other", why=f"{type(error).__name__}: {error}"[:500]))
        finally:
            if ground is not None:
                ground.close()
        return seen

    def _prepared(self, case: LaunchCase, chosen: ChosenKernel, plan: LaunchPlan, step: DecodeStep, seed: int) -> PreparedRun:
        options = {"ground": self.ground, "layers": 1, "via": "driver", "dump": self.ground == "gpu", **self._options}
        request = GroundRequest(
            DrainPlan(layers=1, top_k=case.top_k), (step,), chosen.image, {plan.rows: plan},
            device=self._ordinal, seed=seed, options=options,
        )  # fmt: skip
        window = frozenset({0}) if plan.wedges_on_negative_length and min(case.lengths) < 0 else frozenset[int]()
        return PreparedRun(request, chosen, self.device, window, "", 1)

    def _one(self, ground: Ground, prepared: PreparedRun, step: DecodeStep, plan: LaunchPlan, *, first: bool) -> tuple[Seen, bool]:
        """(what was seen, whether the ground may be used again)."""
        outcome = ground.run_step(step)
        if outcome.state != "hung":
            return Seen("done" if outcome.state == "done" else outcome.state, why="; ".join(outcome.reasons)[:500]), False
        if self.ground == "cpu":
            return Seen("hang", self._identity(ground, prepared, step)), False
        # On a GPU the debugger costs the context: the first hang is identified, the others are released and counted as like it
        # when their counters say the same.
        if first:
            return Seen("hang", self._identity(ground, prepared, step)), False
        reader = getattr(ground, "row_states", None)
        address = standing_counter(reader(), plan.ctas_per_group) if reader is not None else None
        retired = address is not None and ground.unwedge(address, RELEASE_COUNT).retired
        return Seen("hang", None), retired

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
