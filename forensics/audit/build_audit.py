"""One build through all layers, and several builds into one document. Bounded in memory: one cubin's text is held at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...clock import SYSTEM, Clock
from ...kernels.image import KernelImage
from ...kernels.sass.slice import SliceFacts
from ...kernels.sass.symbolic_solver import Solver, z3_version
from .conditions import LaunchConditions
from .consumer import examine_images
from .mitigations import check_mitigations, check_upgrade
from .producer import examine_producer
from .recipe import Recipe
from .recipe_answer import RecipeJudge
from .relatives import histogram_ring, occupancy, row_state
from .relatives_source import fetch_flashinfer_header, flashinfer_findings, flashinfer_version, sentinel_fill
from .release_source import ReleaseSource
from .replay import Replayer
from .slices import SliceStore
from .targets import OpenedTarget
from .verdicts import (
    AuditReport,
    BuildAudit,
    ConsumerFinding,
    DispatchFinding,
    MitigationFinding,
    RecipeAnswer,
    RelativeFinding,
    Unread,
)

__all__ = ["AuditOptions", "assemble", "audit_build"]

#: The GPU whose rows stand first, and that the single-architecture runs (histogram ring) take if the build has it.
FIRST_ARCHITECTURE = 120


@dataclass
class AuditOptions:
    """``sm`` None: every architecture of the build. ``relatives``: also audit the related defects. ``network``: FlashInfer's
    source may be
    fetched. ``replay`` None: witnesses are not run.
    """

    recipe: Recipe = field(default_factory=Recipe)
    sm: int | None = None
    exhaustive: bool = False
    relatives: bool = True
    network: bool = True
    replay: Replayer | None = field(default_factory=Replayer)
    store: SliceStore = field(default_factory=SliceStore)
    solver: Solver = field(default_factory=Solver)
    header: Callable[[str], str] = fetch_flashinfer_header
    clock: Clock = SYSTEM


def _selected(opened: OpenedTarget, options: AuditOptions) -> list[KernelImage]:
    images = list(opened.kernels.images) if opened.kernels is not None else []
    if options.sm is not None and opened.kernels is not None and images:
        best = max(image.sm for image in images)
        images = [image for image in images if image.sm == best]
    return images


def _architectures(images: Sequence[KernelImage], options: AuditOptions) -> list[int]:
    if options.sm is not None:
        return [options.sm]
    found = sorted({image.sm for image in images}, reverse=True)
    return found or [FIRST_ARCHITECTURE]


def audit_build(opened: OpenedTarget, options: AuditOptions, note: Callable[[str], None] = lambda text: None) -> BuildAudit:
    """Everything that the options ask about one build. Never raises for what the build contains: that becomes CANNOT TELL or
    unread."""
    clock = options.clock
    start = clock.monotonic()
    unread = list(opened.unread)
    images = _selected(opened, options)
    if opened.kernels is not None and not images:
        have = ", ".join(opened.kernels.labels) or "none"
        unread.append(Unread(what=f"machine code for sm_{options.sm}", why=f"the build has code for {have} only"))
    consumer: list[ConsumerFinding] = []
    if images:
        note(f"machine code: {len(images)} instantiations")
        consumer = examine_images(
            images, store=options.store, solver=options.solver, replay=options.replay, exhaustive=options.exhaustive, clock=clock
        )
    source = ReleaseSource(opened.members) if opened.members else None
    note("producer")
    producer = examine_producer(source or ReleaseSource({}), options.recipe, FIRST_ARCHITECTURE, 188)
    profile, profile_note = opened.profile()
    judge = RecipeJudge(opened.kernels, source, profile, profile_note, LaunchConditions(options.store))
    dispatch: list[DispatchFinding] = []
    answers: list[RecipeAnswer] = []
    mitigations: list[MitigationFinding] = []
    if source is not None:
        for sm in _architectures(images, options):
            note(f"recipe on sm_{sm}")
            dispatch.append(judge.dispatch(options.recipe, sm))
            answer = _settled(judge.answer(options.recipe, sm), consumer, opened)
            answers.append(answer)
            mitigations.extend(check_mitigations(judge, options.recipe, answer))
    relatives: list[RelativeFinding] = []
    if options.relatives:
        note("relatives")
        relatives = _relatives(opened, options, images, source, unread)
    return BuildAudit(
        target=opened.target, build=opened.identity, consumer=tuple(consumer), producer=tuple(producer),
        dispatch=tuple(dispatch), recipe=tuple(answers),
        mitigations=tuple(mitigations), relatives=tuple(relatives), unread=tuple(unread),
        seconds=round(clock.monotonic() - start, 2),
    )  # fmt: skip


def _settled(answer: RecipeAnswer, consumer: Sequence[ConsumerFinding], opened: OpenedTarget) -> RecipeAnswer:
    """A recipe on which every reachable kernel is proved cannot wedge by this defect: PROVED. A build without the kernel: NOT
    PRESENT."""
    if opened.kernels is None and opened.absent:
        return answer.model_copy(update={"word": "NOT PRESENT", "why": opened.absent, "wedges_at": ()})
    words = {item.word for item in consumer if item.question == "agreement" and item.arch == answer.arch}
    if answer.word == "HOLDS" and words == {"PROVED"}:
        return answer.model_copy(update={"word": "PROVED", "why": "the kernel is proved for every length"})
    return answer


def _relatives(
    opened: OpenedTarget, options: AuditOptions, images: Sequence[KernelImage], source: ReleaseSource | None, unread: list[Unread]
) -> list[RelativeFinding]:
    found: list[RelativeFinding] = []
    profile, note = opened.profile()
    if images:
        for sm in sorted({image.sm for image in images}, reverse=True):
            found.extend(occupancy(options.recipe, sm, profile, note))
        facts = _facts(options.store, images, unread)
        known = profile if opened.identity.known and opened.identity.name.startswith("vllm==") else None
        found.append(row_state(known, note, facts))
        ring = min(images, key=lambda image: (image.sm != FIRST_ARCHITECTURE, image.top_k != 512, image.vec != 4, -image.sm))
        found.append(histogram_ring(ring, clock=options.clock))
    if source is not None:
        found.append(sentinel_fill(source))
        version = flashinfer_version(opened.members)
        if options.network:
            found.extend(flashinfer_findings(version, options.header))
        else:
            found.extend(flashinfer_findings(version, _offline))
    return found


def _offline(version: str) -> str:
    from ...errors import DownloadError

    raise DownloadError(f"flashinfer-python {version} was not fetched: --offline")


def _facts(store: SliceStore, images: Sequence[KernelImage], unread: list[Unread]) -> list[tuple[KernelImage, SliceFacts]]:
    found: list[tuple[KernelImage, SliceFacts]] = []
    for image in images:
        facts = store.cached(image)
        if facts is not None:
            found.append((image, facts))
    return found


def assemble(
    builds: Sequence[BuildAudit],
    recipe: Recipe,
    seconds: float,
    *,
    fail_on: Literal["vulnerable", "recipe", "never"] = "vulnerable",
) -> AuditReport:
    """The document of a run. ``outcome``: vulnerable if a kernel (``fail_on`` vulnerable) or the recipe (``recipe``) is."""
    by_target = {build.target: build for build in builds}
    done = [build.model_copy(update={"mitigations": (*build.mitigations, *check_upgrade(build, by_target))}) for build in builds]
    outcome: Literal["vulnerable", "clean", "inconclusive"] = "clean"
    for build in done:
        word = build.recipe_word if fail_on == "recipe" else build.kernel_word
        if word == "VULNERABLE" and fail_on != "never":
            outcome = "vulnerable"
        elif word == "CANNOT TELL" and outcome != "vulnerable":
            outcome = "inconclusive"
    shown: dict[str, Any] = asdict(recipe)
    return AuditReport(outcome=outcome, recipe=shown, builds=tuple(done), solver=f"z3 {z3_version()}", seconds=round(seconds, 2))
