"""Steps, launches and the danger window, against the published numbers."""

from __future__ import annotations

import pytest

from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.plan import DEFAULT_PROFILE, device_for_sm, device_named
from dsv4_repro.repro.kernel_choice import ChosenKernel, guard_of_release
from dsv4_repro.repro.narrate import expectation, first_lines, progress_line
from dsv4_repro.repro.prepare import PreparedRun, prepare_drain
from dsv4_repro.scenarios.drain import DrainPlan


@pytest.fixture
def chosen(kernel: KernelImage) -> ChosenKernel:
    return ChosenKernel(kernel, DEFAULT_PROFILE, False, "built so")


def _prepare(chosen: ChosenKernel, device: str = "H200", producer: str = "raw", **plan: object) -> PreparedRun:
    return prepare_drain(DrainPlan(**plan), "gpu", chosen, device_named(device), producer=producer)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["H200", "RTX PRO 6000 Blackwell", "GB10", "B200"])
def test_the_window_is_the_first_step_with_three_live(chosen: ChosenKernel, device: str) -> None:
    prepared = _prepare(chosen, device)
    first = next(step for step in prepared.request.steps if step.index == min(prepared.window))
    assert (first.live_requests, first.rows, first.graph_rows, first.padded_requests) == (3, 6, 8, 1)
    assert {step.live_requests for step in prepared.request.steps if step.index in prepared.window} == {3}
    launch = prepared.request.launches[8]
    assert (launch.grid, launch.ctas_per_group, launch.chunk_size) == (16, 2, 8192)
    assert prepared.layers == 21


def test_four_live_as_the_floor_never_reaches_it_and_says_why(chosen: ChosenKernel) -> None:
    prepared = _prepare(chosen, min_live=4)
    assert prepared.window == frozenset()
    assert "one CTA holds a row" in prepared.why_no_window


def test_plain_decode_has_no_negative_length(chosen: ChosenKernel) -> None:
    prepared = _prepare(chosen, mtp=0)
    assert prepared.window == frozenset()
    assert "no step has a padded slot" in prepared.why_no_window


def test_a_clamped_producer_still_reaches_the_window(chosen: ChosenKernel) -> None:
    raw, clamped = _prepare(chosen), _prepare(chosen, producer="clamped")
    assert clamped.window == raw.window
    assert not any(step.danger for step in clamped.request.steps)


def test_long_rows_keep_the_peers(chosen: ChosenKernel) -> None:
    prepared = _prepare(chosen, max_model_len=262144)
    assert prepared.window == frozenset()
    assert "peers stay" in prepared.why_no_window


def test_rows_that_another_kernel_takes_stay_in_and_are_named(chosen: ChosenKernel) -> None:
    prepared = _prepare(chosen, requests=40, max_num_seqs=40, capture_sizes=(8, 80))
    assert [step.index for step in prepared.request.steps] == list(range(len(prepared.request.steps)))
    assert any("80 rows: the filtered kernel takes them" in note for note in prepared.notes)


@pytest.mark.parametrize(
    ("text", "release", "guarded"),
    [
        ("0.27.1", "0.27.1", False),
        ("0.28.0", "0.28.0", True),
        ("0.33.0", "0.33.0", True),
        ("0.28.1.dev12", None, None),
        ("0.28.0rc1", None, None),
        ("0.28.0+fork", None, None),
        ("nightly", None, None),
        (None, None, None),
    ],
)
def test_only_plain_releases_are_judged_by_their_number(text: str | None, release: str | None, guarded: bool | None) -> None:
    assert guard_of_release(text) == (release, guarded)


def test_expectations_are_said_before_the_run(chosen: ChosenKernel) -> None:
    prepared = _prepare(chosen)
    steps, window = prepared.request.steps, sorted(prepared.window)
    assert "a hang is expected at step" in expectation(steps, window, guarded=False, clamped=False)[0]
    assert "--kernel builtin (or vllm==0.27.1) shows the hang" in expectation(steps, window, guarded=True, clamped=False)[0]
    assert "--producer raw shows the hang" in expectation(steps, window, guarded=False, clamped=True)[0]
    assert expectation(steps, window, guarded=None, clamped=False)[0].startswith("the danger window is")
    assert "inconclusive" in expectation(steps, [], guarded=False, clamped=False, why_no_window="all full")[0]


def test_first_lines_name_ground_kernel_plan_and_launch(chosen: ChosenKernel) -> None:
    prepared = _prepare(chosen)
    lines = first_lines(
        ground="gpu", why="a free NVIDIA GPU", target="H200", kernel=chosen.image, guarded=False, plan=DrainPlan(),
        steps=prepared.request.steps, window=sorted(prepared.window), launches=prepared.request.launches, producer="raw",
        layers=21, trials=3, notes=["a note"],
    )  # fmt: skip
    text = "\n".join(lines)
    assert lines[0] == "run drain --on gpu (a free NVIDIA GPU): H200"
    assert "kernel builtin for sm_90, instantiation <512, 4>: unguarded" in text
    assert "16 requests to 3 live" in text
    assert "21 indexer layers a step; 3 trials" in text
    assert "8 groups of 2 CTAs" in text
    assert lines[-1] == "a note"


def test_progress_names_step_requests_and_padding(chosen: ChosenKernel) -> None:
    steps = _prepare(chosen).request.steps
    danger = next(step for step in steps if step.danger and step.live_requests == 3)
    line = progress_line(1, 1, danger, 59, "capturing")
    assert line == f"step {danger.index + 1}/60 · 3 live · 6 rows → graph 8 · capturing"
    assert progress_line(2, 5, steps[0], 59) == "trial 2/5 · step 1/60 · 16 live · 32 rows"


def test_devices_stand_for_architectures() -> None:
    assert device_for_sm(120).sm == 120
