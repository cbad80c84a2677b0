"""The answer for a recipe: at which live-request counts a build wedges, composed of the three layers, each run on the batch in
question.

For every count and every graph size that it can be padded to: the release's own metadata code makes the lengths, its dispatch
names the
operator and its arguments, the launcher's arithmetic makes the launch, and the machine code's own conditions say whether a group
waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...errors import ReproError
from ...kernels.devices import DeviceDescription, device_for_sm
from ...kernels.image import KernelImage
from ...kernels.plan import ReleaseProfile, padded_stride, plan_launch
from ...kernels.shipped import ShippedKernels
from .conditions import LaunchConditions
from .dispatch import TopKCall, run_dispatch
from .producer import build_metadata
from .recipe import PaddedShape, Recipe, padded_shapes
from .release_source import ReleaseSource
from .values import CannotDecideError, InterpretedError
from .verdicts import DispatchFinding, LiveCount, RecipeAnswer, Word
from .vllm_standin import PADDED_WIDTH, Batch

__all__ = ["RecipeJudge"]

_OTHER_KERNELS = {
    "cooperative_topk": "a cluster launch whose CTAs meet at the hardware's cluster barrier, not at a counter in memory",
    "top_k_per_row_decode": "one CTA a row", "large_context_topk": "one CTA a row",
}  # fmt: skip


@dataclass
class RecipeJudge:
    """Judges recipes for one build. ``kernels`` or ``source`` None: that layer is not there; ``profile_note``: whose launcher
    arithmetic."""

    kernels: ShippedKernels | None
    source: ReleaseSource | None
    profile: ReleaseProfile
    profile_note: str
    conditions: LaunchConditions
    _calls: dict[tuple[Recipe, int, int, int, int], TopKCall | str] = field(default_factory=dict)

    def call_for(self, recipe: Recipe, device: DeviceDescription, live: int, graph_rows: int, row_stride: int) -> TopKCall | str:
        """The top-k call for ``live`` requests padded to ``graph_rows``; a text where the release's code cannot be followed."""
        key = (recipe, device.sm, live, graph_rows, row_stride)
        if key not in self._calls:
            self._calls[key] = self._call(recipe, device, live, graph_rows, row_stride)
        return self._calls[key]

    def _call(self, recipe: Recipe, device: DeviceDescription, live: int, graph_rows: int, row_stride: int) -> TopKCall | str:
        if self.source is None:
            return "the build's Python is not at hand"
        slots = max(graph_rows // recipe.next_n, live)
        context = max(recipe.max_model_len, recipe.next_n)
        lengths = (context,) * live + (0,) * (slots - live)
        queries = (recipe.next_n,) * live + (0,) * (slots - live)
        wide = replace(recipe, max_num_batched_tokens=max(recipe.max_num_batched_tokens, graph_rows))
        try:
            built = build_metadata(self.source, wide, Batch(lengths, queries, graph_rows), device.sm, device.num_sms, row_stride)
            return run_dispatch(self.source, wide, built, graph_rows)
        except InterpretedError as error:
            return f"the release's code raised {error}"
        except CannotDecideError as error:
            return str(error)

    def dispatch(self, recipe: Recipe, sm: int) -> DispatchFinding:
        """Which operator three live requests reach (padded as the recipe pads them), and with what."""
        arch = f"sm_{sm}"
        try:
            device = device_for_sm(sm)
        except ReproError as error:
            return DispatchFinding(arch=arch, operator="", why=str(error))
        sizes = recipe.graph_sizes
        live = min(3, recipe.max_num_seqs)
        rows = live * recipe.next_n
        padded = min((size for size in sizes if size >= rows), default=rows)
        call = self.call_for(recipe, device, live, padded, recipe.width)
        if isinstance(call, str):
            return DispatchFinding(arch=arch, operator="", why=call)
        zeroed = f"row states zeroed by the host: {self.profile.zeroed} ({self.profile_note})"
        return DispatchFinding(
            arch=arch, operator=call.operator, rows=call.rows, stride=call.stride, max_seq_len=call.max_seq_len,
            max_seq_len_is=_promised(call, recipe), lengths=call.lengths, where=call.place,
            zeroed=zeroed if call.operator == "persistent_topk" else "",
        )  # fmt: skip

    def answer(self, recipe: Recipe, sm: int) -> RecipeAnswer:
        """The verdict for an architecture, with every live-request count."""
        arch = f"sm_{sm}"
        if recipe.not_modelled:
            return RecipeAnswer(arch=arch, word="CANNOT TELL", why=recipe.not_modelled)
        try:
            device = device_for_sm(sm)
        except ReproError as error:
            return RecipeAnswer(arch=arch, word="CANNOT TELL", why=str(error))
        counts = [self._count(recipe, device, shape) for shape in padded_shapes(recipe)]
        wedges = sorted({item.live for item in counts if item.word == "VULNERABLE"})
        words = {item.word for item in counts}
        word: Word
        why = ""
        if wedges:
            word = "VULNERABLE"
            why = next(item.why for item in counts if item.word == "VULNERABLE")
        elif "CANNOT TELL" in words:
            word = "CANNOT TELL"
            why = next(item.why for item in counts if item.word == "CANNOT TELL")
        elif words <= {"NOT PRESENT"}:
            word, why = "NOT PRESENT", next((item.why for item in counts), "")
        else:
            word = "HOLDS"
            why = "no live-request count makes a group wait: " + "; ".join(sorted({item.why for item in counts})[:3])
        return RecipeAnswer(arch=arch, word=word, wedges_at=tuple(wedges), counts=tuple(counts), device=device.name, why=why)

    def _count(self, recipe: Recipe, device: DeviceDescription, shape: PaddedShape) -> LiveCount:
        if shape.live == 0:
            why = "a rank without requests runs a dummy batch, which is not modelled"
            return LiveCount(live=0, graph_rows=shape.graph_rows, word="CANNOT TELL", why=why)
        if shape.padding == 0:
            return LiveCount(live=shape.live, graph_rows=shape.graph_rows, word="HOLDS", why=f"{shape.why}: no padding slot")
        plain = self._judged(recipe, device, shape, recipe.width)
        padded = padded_stride(recipe.width, PADDED_WIDTH)
        if padded == recipe.width:
            return plain
        other = self._judged(recipe, device, shape, padded)
        if other.word == plain.word:
            return plain
        why = f"it depends on the row stride: {plain.word} at {recipe.width}, {other.word} where rows are padded to {padded} floats"
        return plain.model_copy(update={"word": "CANNOT TELL", "why": why})

    def _judged(self, recipe: Recipe, device: DeviceDescription, shape: PaddedShape, row_stride: int) -> LiveCount:
        call = self.call_for(recipe, device, shape.live, shape.graph_rows, row_stride)
        if isinstance(call, str):
            return LiveCount(live=shape.live, graph_rows=shape.graph_rows, word="CANNOT TELL", why=call)

        def result(word: Word, why: str) -> LiveCount:
            return LiveCount(live=shape.live, graph_rows=shape.graph_rows, word=word, operator=call.operator, why=why)

        if call.operator != "persistent_topk":
            return result(
                "NOT PRESENT", f"{call.operator}, another kernel: {_OTHER_KERNELS.get(call.operator, 'not examined here')}"
            )
        lengths = [item for item in call.lengths if item is not None]
        if len(lengths) != call.rows or call.max_seq_len is None:
            return result("CANNOT TELL", "the lengths that reach the kernel are not known")
        if self.kernels is None:
            return result("CANNOT TELL", "the build's machine code is not at hand")
        stride = call.width if self.profile.stride_is_width else call.stride
        try:
            plan = plan_launch(call.rows, stride, call.max_seq_len, recipe.top_k, device, release_profile=self.profile)
            if plan.path != "persistent":
                return result("NOT PRESENT", f"{call.rows} rows take the {plan.path} path, not the barrier kernel")
            image: KernelImage = self.kernels.pick(device.sm, recipe.top_k, plan.vec)
            waiting = self.conditions.waiting_rows(image, plan, lengths)
        except ReproError as error:
            return result("CANNOT TELL", str(error))
        illegal = sorted({item for item in lengths if item < 0})
        promised = f"max_seq_len {call.max_seq_len}, rows of {stride}, {plan.ctas_per_group} CTAs a group"
        if waiting:
            length = lengths[waiting[0]]
            return result("VULNERABLE", f"row {waiting[0]} has length {length}: its leader waits, its peer has left ({promised})")
        if not illegal:
            return result("HOLDS", "no illegal length reaches the kernel")
        if plan.ctas_per_group < 2:
            return result("HOLDS", f"length {illegal[0]} reaches the kernel, but one CTA holds a whole row ({promised})")
        return result("HOLDS", f"length {illegal[0]} reaches the kernel, and leader and peers take the same way ({promised})")


def _promised(call: TopKCall, recipe: Recipe) -> str:
    if call.max_seq_len is None:
        return "not passed"
    if recipe.compress == 1 and call.max_seq_len == recipe.max_model_len:
        return "the row width, which is also the batch's maximum"
    if call.max_seq_len == call.width:
        return "the row width (logits.shape[1])"
    return "the batch's maximum, uncompressed" if call.max_seq_len == recipe.max_model_len else "another value"
