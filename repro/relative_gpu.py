"""One row of a scenario on a card: the launch in a child process, watched, captured, released and diagnosed as a drain's step is.

The run loop, the watchdog, the capture and the experiment are those of ``run drain --on gpu``; only the workload differs
(``kernels.relative_child``), and why a finished launch is wrong is explained from its answers here. What a row expects is never
looked at.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import PlanError, ReproError, UsageError
from ..forensics.wrong_rows import explain_wrong_rows
from ..kernels.cooperative import CLUSTER
from ..kernels.plan import LaunchPlan, resident_ctas_per_sm
from ..kernels.reference import check_rows
from ..kernels.topk_cases import TopKCase
from ..scenarios.drain import DrainPlan
from ..scenarios.drain_steps import DecodeStep
from ..scenarios.launches import CooperativeLaunch, Launch, LeftoverCase, Row
from .gpu_ground import GpuGround
from .ground import GroundRequest, StepOutcome

if TYPE_CHECKING:
    from ..kernels.devices import DeviceDescription
    from ..kernels.image import KernelImage

__all__ = ["RelativeGround", "gpu_request", "image_of", "on_device", "relative_diagnose", "step_of"]

CHILD_MODULE = "dsv4_repro.kernels.relative_child"
#: A dump writes some thousand sections for each resident CTA of 1024 threads: above so many it takes longer than it tells.
DUMPED_CTAS = 32
#: One vector of a chunk of a group that is made larger than the card, floats.
_CHUNK = 1024
#: Floats for which the launch arithmetic asks for 197 KiB of dynamic shared memory: more than cooperative_topk uses.
_COOPERATIVE_CHUNK = 50_000

Register = Callable[[str, Path, Literal["measured", "interpreted", "reported"]], Any]


def slots_of(case: TopKCase, image: KernelImage, device: DeviceDescription, dynamic_smem: int | None = None) -> int:
    """CTAs of this launch that the card holds at once, reckoned. ``dynamic_smem``: bytes, None for the case's own."""
    smem = case.dynamic_smem if dynamic_smem is None else dynamic_smem
    per_sm = resident_ctas_per_sm(device, dynamic_smem=smem, registers=image.registers, static_smem=image.static_smem)
    return per_sm * device.num_sms


def _smem_of(what: Launch, image: KernelImage, device: DeviceDescription) -> int:
    """Dynamic shared memory of the launch, bytes. Where another kernel holds slots, as much as leaves room for no CTA more than the
    threads do: then a holder of one warp takes a slot too, and a dump of hundreds of holders stays small.
    """
    case = what.case
    if not what.leave:
        return case.dynamic_smem
    per_sm = max(slots_of(case, image, device) // device.num_sms, 1)
    share = device.smem_per_sm // per_sm - device.reserved_smem_per_cta - image.static_smem
    return max(min(share // 128 * 128, device.smem_optin - image.static_smem), case.dynamic_smem)


def on_device(what: Launch, image: KernelImage, device: DeviceDescription) -> Launch:
    """The launch for this card: a group ``beyond`` its slots is made for their number. PlanError where it cannot be launched."""
    if what.beyond is not None:
        ctas = slots_of(what.case, image, device) + what.beyond
        length = max(ctas * _CHUNK, 32772)
        case = TopKCase(f"one group of {ctas} CTAs", what.case.k, what.case.vec, (length,), length, length, ctas, 1, _CHUNK)
        what = dataclasses.replace(what, case=case)
    if what.case.dynamic_smem > device.smem_optin:
        raise PlanError(f"the launch needs {what.case.dynamic_smem} bytes of shared memory, {device.name} has {device.smem_optin}")
    return what


def launch_plan(what: Launch, image: KernelImage, device: DeviceDescription) -> LaunchPlan:
    """The row's launch as the GPU ground wants it; nothing of it is a release's own arithmetic."""
    case, smem = what.case, _smem_of(what, image, device)
    cap = slots_of(case, image, device, smem)
    return LaunchPlan(
        rows=len(case.lengths), stride=case.stride, top_k=case.k, vec=case.vec, chunk_size=case.chunk_size,
        ctas_per_group=case.ctas_per_group, groups=case.groups, grid=case.grid, dynamic_smem=smem,
        max_seq_len=case.max_seq_len, smem_budget=device.smem_optin, occupancy=cap // max(device.num_sms, 1),
        num_sms=device.num_sms, resident_cap=cap, path="persistent", oversubscribed=case.grid > cap, refusal="",
        release="a row of a scenario",
    )  # fmt: skip


def step_of(case: TopKCase) -> DecodeStep:
    """The launch as the one step of a run: rows are rows, there are no requests."""
    rows = len(case.lengths)
    return DecodeStep(
        index=0, live_requests=rows, next_n=1, rows=rows, graph_rows=rows, padded_requests=0, query_start_loc=(), seq_lens=(),
        decode_lens=(), expanded=case.lengths, lengths=case.lengths, finished=(), danger=min(case.lengths) < 0, path="native",
    )  # fmt: skip


def gpu_request(
    what: Launch, image: KernelImage, device: DeviceDescription, *, ordinal: int, seed: int, folder: Path,
    options: Mapping[str, Any] | None = None,
) -> GroundRequest:  # fmt: skip
    """What the ground is asked to run. ``folder``: in the run's evidence; the logits and a wrong launch's answers are kept there.

    ``what``: as ``on_device`` made it. Compiles the companions where the row has some (ToolMissingError without NVRTC).
    """
    case = what.case
    plan = launch_plan(what, image, device)
    logits = folder / "logits.bin"
    logits.write_bytes(case.logits().astype(np.float32).tobytes())
    extra: dict[str, Any] = {
        "logits": str(logits.absolute()), "counter": what.counter, "answers": str((folder / "answers.bin").absolute()),
        "queued": bool(what.queued), "leave": what.leave, "cooperative": "cooperative_topk" in image.function,
    }  # fmt: skip
    if what.beyond is not None or what.leave:
        extra["slots"] = plan.resident_cap
    if what.queued or what.leave:
        from ..kernels.build import compile_kernel

        beside = folder / "companions.cubin"
        beside.write_bytes(compile_kernel("companions.cu", device.sm).cubin)
        extra["beside"] = str(beside.absolute())
    step = step_of(case)
    return GroundRequest(
        plan=DrainPlan(layers=1), steps=(step,), kernel=image, launches={step.graph_rows: plan}, device=ordinal, seed=seed,
        options={"ground": "gpu", "layers": 1, "child_module": CHILD_MODULE, "extra": extra, **(options or {})},
    )  # fmt: skip


class RelativeGround(GpuGround):
    """The GPU ground with a row's launch. ``launch``: as ``on_device`` made it; ``keep``: enters a file into the run's evidence."""

    def __init__(self, launch: Launch, *, keep: Register | None = None, **more: Any) -> None:
        super().__init__(**more)
        self._launch = launch
        self._keep = keep
        self._kept = False
        #: What the child saw beside the launch while it hung: CTAs of the queued kernel that ran, slots held.
        self.beside: dict[str, Any] = {}

    def _another(self, **more: Any) -> GpuGround:
        return RelativeGround(self._launch, **more)

    def run_step(self, step: DecodeStep) -> StepOutcome:
        """As the GPU ground's; on a hang the kernels beside the launch are looked at, on a wrong answer it is explained."""
        outcome = super().run_step(step)
        if outcome.state == "hung" and (self._launch.queued or self._launch.leave) and not self.beside:
            try:
                seen = self.row_states()
            except ReproError:
                return outcome  # the row states are read again by the capture, which says why not
            self.beside = {key: seen[key] for key in ("queued_ran", "queued_grid", "held_slots") if key in seen}
        if outcome.state == "wrong":
            return self._explained(outcome)
        return outcome

    def _explained(self, outcome: StepOutcome) -> StepOutcome:
        """The cause of wrong rows, from the answers, the logits and the counters; without one the rows are named and no more."""
        case = self._launch.case
        extra = self._request.options["extra"]
        path = Path(extra["answers"])
        try:
            indices = np.frombuffer(path.read_bytes(), dtype=np.int32).reshape(len(case.lengths), case.k)
            states = self.row_states()
        except (OSError, ValueError, ReproError) as error:
            return dataclasses.replace(outcome, reasons=(*outcome.reasons, f"the answers could not be read back: {error}"))
        counters = tuple(int(group["arrival"]) for group in states["groups"])[: case.groups]
        logits = case.logits()
        verdicts = check_rows(indices, logits, np.array(case.lengths, np.int32), case.k)
        known = not self._launch.early_exit and min(case.lengths) >= 0
        found = explain_wrong_rows(
            verdicts, case.lengths, logits, case.k, case.groups, counters=counters,
            expected_counters=case.counters() if known else (),
        )  # fmt: skip
        if self._keep is not None and not self._kept:
            self._kept = True
            document = {
                "origin": "measured", "counters": list(counters), "rows": [verdict.text for verdict in verdicts[:200]],
                "cause": found.cause, "reasons": list(found.reasons),
            }  # fmt: skip
            listed = path.with_name("answers.json")
            listed.write_text(json.dumps(document, indent=1), encoding="utf-8")
            self._keep("answers", listed, "measured")
            self._keep("answers-raw", path, "measured")
        detail = {**outcome.detail, "counters": list(counters), "cause": found.cause}
        return dataclasses.replace(outcome, reasons=found.reasons, detail=detail)


def relative_diagnose(row: Row, ground: Callable[[], RelativeGround | None]) -> Any:
    """``run.Diagnose`` for a row: no step of a server is behind it, and what stood beside the launch is told."""

    def diagnose(state: Any, *, step: DecodeStep, evidence: Any, unwedge: Any) -> Any:
        from ..forensics.diagnose import diagnose_state

        made = ground()
        beside = made.beside if made is not None else {}
        host, extra = "", {}
        if isinstance(row.what, Launch) and row.what.queued and "queued_ran" in beside:
            ran, grid = beside["queued_ran"], beside["queued_grid"]
            extra["queued"] = {"kernel": row.what.queued, "ran": ran, "grid": grid, "origin": "measured"}
            if not ran:
                host = f"{row.what.queued} was launched behind it on the same stream, and none of its {grid} CTAs ran"
        if "held_slots" in beside:
            extra["held_slots"] = beside["held_slots"]
        return diagnose_state(state, ground="gpu", evidence=evidence, unwedge=unwedge, host=host, extra=extra or None)

    return diagnose


def row_on_gpu(row: Row) -> Launch:
    """The row's launch; UsageError for a row that a card cannot show."""
    if "gpu" in row.grounds and isinstance(row.what, CooperativeLaunch):
        return _cooperative(row.what)
    if "gpu" not in row.grounds or not isinstance(row.what, Launch):
        raise UsageError(f"row {row.name} runs on the {' and '.join(row.grounds)} ground only")
    return row.what


def image_of(row: Row, what: Launch, sm: int) -> tuple[KernelImage, str]:
    """(the row's kernel for a card of architecture ``sm``, where it is from). Errors as of ``kernels.select.select``."""
    if isinstance(row.what, CooperativeLaunch):
        from ..kernels.cooperative import cooperative_image

        image = cooperative_image(row.kernel, sm, what.case.k)
        return image, f"{image.origin}: cooperative_topk for sm_{sm}, from the release's wheel"
    from ..kernels.select import select

    chosen = select(row.kernel, sm=sm, top_k=what.case.k, vec=what.case.vec)
    return chosen.image, chosen.note


def _cooperative(what: CooperativeLaunch) -> Launch:
    """As a launch of the ground's own shape: a cluster a row is a group, and the chunk stands for its shared memory."""
    case = LeftoverCase(
        "cooperative", what.top_k, 4, what.lengths, what.stride, what.stride, CLUSTER, len(what.lengths), _COOPERATIVE_CHUNK
    )  # fmt: skip
    return Launch(case, early_exit=True)
