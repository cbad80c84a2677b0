"""A finding's witness run on the CPU ground: the shipped machine code, interpreted, with the very length that the solver named.

``agreement``: the launch must come to a proven deadlock. ``bounds``: eight rows, each with an illegal length; entries behind the
row are larger
than those in it, so that a row taken for longer than it is shows as an index behind its end (or as an access outside the logits).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError
from ...kernels.cache import Cache, content_key
from ...kernels.devices import device_for_sm
from ...kernels.image import KernelImage
from ...kernels.plan import LaunchPlan, plan_launch
from ...kernels.sass.program import Program
from ...kernels.sass.topk import run_topk
from .verdicts import ConsumerFinding, Witness

__all__ = ["Replayer"]

#: Rows of the bounds run: their true length is BOUND, their stride twice that.
BOUND, STRIDE = 8192, 16384
_LENGTHS = (-1, -(1 << 31), 8193, 12000, 16384, 20000, 32768, (1 << 31) - 1)
MAX_WITNESS_ROW = 1 << 18


@lru_cache(maxsize=1)
def _machine_version() -> str:
    folder = Path(__file__).resolve().parents[2] / "kernels" / "sass"
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass
class Replayer:
    """Callable as ``consumer.Replay``. Outcomes are kept by content: a second audit of the same code says so and runs nothing.

    ``deadline_s``: of one run. ``runs``: how many were made in this call.
    """

    cache: Cache | None = field(default_factory=lambda: Cache("replay"))
    deadline_s: float = 20.0
    clock: Clock = SYSTEM
    runs: int = 0

    def __call__(self, image: KernelImage, finding: ConsumerFinding) -> tuple[bool | None, str]:
        """Whether the machine code shows the defect (None: could not be run), and what happened."""
        witness = finding.witness
        if witness is None:
            return None, "no witness"
        if finding.question == "bounds" and finding.word == "VULNERABLE":
            return None, "needs no run: the code itself sends that length, which the row cannot have, past the bound"
        key = content_key(
            "replay",
            _machine_version(),
            image.cubin_sha256,
            image.function,
            finding.question,
            witness.model_dump_json(exclude={"instructions"}),
        )
        kept = self.cache.load(key) if self.cache is not None else None
        if kept is not None:
            try:
                outcome, text = json.loads(kept)
                return outcome, f"{text} (kept from an earlier run)"
            except (ValueError, TypeError):
                pass  # an entry of another form: run again
        try:
            self.runs += 1
            outcome, text = self._deadlocks(image, witness) if finding.question == "agreement" else self._reads_beyond(image)
        except ReproError as error:
            return None, f"not replayed: {error}"
        if self.cache is not None:
            self.cache.store(key, json.dumps([outcome, text]).encode())
        return outcome, text

    def _program(self, image: KernelImage) -> Program:
        return Program.from_image(image)

    def _deadlocks(self, image: KernelImage, witness: Witness) -> tuple[bool | None, str]:
        if witness.stride > MAX_WITNESS_ROW or not witness.launcher or witness.launcher.startswith("not shown"):
            return None, "not replayed: the witness is not a launch of the launcher's"
        plan = self._plan(image, witness.stride, witness.max_seq_len)
        lengths = np.zeros(plan.rows, np.int32)
        lengths[witness.row] = witness.length
        program = self._program(image)
        run = run_topk(
            program, np.zeros((plan.rows, plan.stride), np.float32), lengths, k=image.top_k, chunk_size=plan.chunk_size,
            ctas_per_group=plan.ctas_per_group, groups=plan.groups, max_seq_len=plan.max_seq_len, dynamic_smem=plan.dynamic_smem,
            deadline=Deadline(self.deadline_s, self.clock),
        )  # fmt: skip
        program.save_code()
        counter = run.counters[witness.row % plan.groups]
        stuck = sorted({item.block for item in run.result.stuck})
        what = f"{run.result.kind}: grid {plan.grid}, stuck CTAs {stuck}, arrival counter {counter} of {plan.ctas_per_group}"
        return run.result.kind == "deadlock" and run.result.spin, what if stuck else run.result.kind

    def _reads_beyond(self, image: KernelImage) -> tuple[bool | None, str]:
        plan = self._plan(image, STRIDE, BOUND)
        rows = plan.rows
        logits = np.arange(rows * STRIDE, dtype=np.float32).reshape(rows, STRIDE)
        lengths = np.array(_LENGTHS[:rows], np.int32)
        program = self._program(image)
        run = run_topk(
            program, logits, lengths, k=image.top_k, chunk_size=plan.chunk_size, ctas_per_group=plan.ctas_per_group,
            groups=plan.groups,
            max_seq_len=BOUND, dynamic_smem=plan.dynamic_smem, deadline=Deadline(self.deadline_s, self.clock),
        )  # fmt: skip
        program.save_code()
        if run.result.kind == "fault":
            return True, f"fault: {run.result.fault.message if run.result.fault is not None else 'an access outside memory'}"
        if run.result.kind != "completed":
            return None, f"the run ended as {run.result.kind}"
        beyond = [int(lengths[row]) for row in range(rows) if bool((run.outputs[row] >= BOUND).any())]
        if beyond:
            return True, f"lengths {beyond} gave indices behind the row of {BOUND}"
        return False, f"lengths {[int(item) for item in lengths]} with a row of {BOUND}: no index behind it, no access outside"

    def _plan(self, image: KernelImage, stride: int, promised: int) -> LaunchPlan:
        return plan_launch(8, stride, promised, image.top_k, device_for_sm(image.sm), registers=image.registers)
