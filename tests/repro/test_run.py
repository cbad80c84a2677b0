"""The run loop, through every way a run can go."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import NoDeviceError, RunStoreError
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.kernels.abi import RELEASE_COUNT
from dsv4_repro.repro.ground import GroundRequest
from dsv4_repro.repro.run import RunSettings, run_workload
from dsv4_repro.repro.run_findings import RunResult
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.scenarios.drain_steps import DecodeStep

Build = Callable[..., GroundRequest]


def _danger(request: GroundRequest) -> int:
    return next(step.index for step in request.steps if step.danger)


def _play(fakes: Any, request: GroundRequest, store: RunStore, grounds: Any, **settings: Any) -> RunResult:
    queue = list(grounds) if isinstance(grounds, list) else None
    window = settings.pop("window", frozenset(step.index for step in request.steps if step.danger))

    def make() -> Any:
        return queue.pop(0) if queue is not None else grounds

    return run_workload(
        request,
        make,
        store,
        RunSettings(window=window, **settings),
        diagnose=fakes.diagnose,
        watch=fakes.watched(),
        clock=FakeClock(),
    )


def _timeline(store: RunStore) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store.path / "timeline.jsonl").read_text().splitlines()]


def test_a_hang_is_captured_judged_released_and_dumped_in_this_order(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    danger = _danger(request)
    ground = fakes.ground(script={danger: "hung"})
    result = _play(fakes, request, store, ground)
    after = ground.calls[ground.calls.index(f"step {danger}") :]
    assert after == [f"step {danger}", "capture", "unwedge", f"step {danger}", "capture+dump", "close"]
    assert result.outcome == "hang"
    assert result.diagnosis.verdict.cause == "peer-left"
    assert result.unwedge is not None
    assert result.unwedge.retired
    assert result.unwedge.value == RELEASE_COUNT
    assert result.unwedge.address == fakes.counter
    assert result.diagnosis.window.live_requests == 3
    assert result.diagnosis.window.reached is True
    extra = result.diagnosis.model_extra or {}
    assert extra["unwedge"]["retired"] is True
    assert extra["trials"]["hang"] == 1
    kinds = [line["kind"] for line in _timeline(store)]
    assert kinds.index("hung") < kinds.index("capture") < kinds.index("unwedge") < kinds.index("verdict") < kinds.index("close")
    assert kinds[-1] == "end"


def test_without_the_experiment_the_dump_is_taken_at_once(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    ground = fakes.ground(script={_danger(request): "hung"})
    result = _play(fakes, request, store, ground, unwedge=False)
    assert ground.calls[-2:] == ["capture+dump", "close"]
    assert "unwedge" not in ground.calls
    assert result.unwedge is None


def test_no_dump_without_consent(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    ground = fakes.ground(script={_danger(request): "hung"})
    _play(fakes, request, store, ground, allow_dump=False)
    assert "capture+dump" not in ground.calls
    assert ground.calls[-4:] == ["unwedge", f"step {_danger(request)}", "capture", "close"]


def test_where_a_dump_costs_nothing_it_is_part_of_the_first_capture(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    ground = fakes.ground(name="cpu", script={_danger(request): "hung"})
    _play(fakes, request, store, ground, dump_ends_context=False)
    assert [call for call in ground.calls if not call.startswith("step")] == ["open", "capture+dump", "unwedge", "close"]


def test_a_kernel_that_does_not_retire_is_dumped_as_it_stands(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    danger = _danger(request)
    ground = fakes.ground(script={danger: "hung"}, retires=False)
    result = _play(fakes, request, store, ground)
    assert ground.calls.count(f"step {danger}") == 1
    assert ground.calls[-3:] == ["unwedge", "capture+dump", "close"]
    assert result.unwedge is not None
    assert not result.unwedge.retired


def test_a_hang_nobody_could_read_is_the_weaker_class_and_says_what_is_missing(
    fakes: Any, request_for: Build, store: RunStore
) -> None:
    request = request_for()
    unread = (Unread("cuda-gdb", "not found", "install the CUDA toolkit"),)
    ground = fakes.ground(script={_danger(request): "hung"}, sees_device=False, unread=unread)
    ground.row_states = dict
    result = _play(fakes, request, store, ground)
    assert result.outcome == "hang"
    assert result.diagnosis.verdict.class_ == "gpu-kernel-stuck"
    assert result.diagnosis.verdict.signature is None
    assert [item.what for item in result.diagnosis.unread] == ["cuda-gdb"]
    assert result.unwedge is not None
    assert not result.unwedge.attempted
    assert "unwedge" not in ground.calls


def test_clean_with_the_window_reached(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    result = _play(fakes, request, store, fakes.ground())
    assert result.outcome == "clean"
    assert result.diagnosis.verdict.class_ == "not-hung"
    assert result.diagnosis.window.live_requests == 3
    assert result.counts.clean == 1
    assert result.closed is not None
    assert result.closed.device_idle


def test_clean_without_the_window_says_nothing(fakes: Any, request_for: Build, store: RunStore) -> None:
    result = _play(fakes, request_for(), store, fakes.ground(), window=frozenset(), why_no_window="every batch fills its graph")
    assert result.outcome == "inconclusive"
    assert result.diagnosis.verdict.sentence.startswith("window not reached: every batch fills its graph")
    assert result.counts.no_window == 1


@pytest.mark.parametrize(
    ("state", "class_", "ends"),
    [
        ("wrong", "wrong-result", False),
        ("died", "worker-dead", True),
        ("fault", "gpu-fault", True),
        ("refused", "launch-refused", True),
    ],
)
def test_other_failures(fakes: Any, request_for: Build, store: RunStore, state: str, class_: str, ends: bool) -> None:
    result = _play(fakes, request_for(), store, fakes.ground(script={1: state}))
    assert result.outcome == "other"
    assert result.diagnosis.verdict.class_ == class_
    assert result.diagnosis.verdict.cause is None
    assert result.counts.other == 1


def test_a_cause_is_taken_from_the_ground_only_if_it_is_a_known_word(fakes: Any, request_for: Build, store: RunStore) -> None:
    result = _play(fakes, request_for(), store, fakes.ground(script={1: "fault"}, detail={"cause": "illegal-access"}))
    assert result.diagnosis.verdict.cause == "illegal-access"


def test_an_invented_cause_is_not_repeated(fakes: Any, request_for: Build, store: RunStore) -> None:
    result = _play(fakes, request_for(), store, fakes.ground(script={1: "fault"}, detail={"cause": "cosmic ray"}))
    assert result.diagnosis.verdict.cause is None


def test_trials_reuse_one_process_once_the_hang_is_released(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    ground = fakes.ground(script={_danger(request): "hung"})
    result = _play(fakes, request, store, ground, trials=20, allow_dump=False)
    assert result.counts.hang == 20
    # The first hang is read by a debugger, which costs that process; all others are released in one.
    assert ground.calls.count("open") == ground.calls.count("close") == 2
    assert ground.calls.count("capture") == 2
    assert ground.calls.count("unwedge") == 20
    (bound,) = result.counts.bounds
    assert bound.side == "at least"
    assert bound.value == pytest.approx(0.05 ** (1 / 20))


def test_after_a_dump_the_next_trial_gets_a_new_process(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    danger = _danger(request)
    first, second = fakes.ground(script={danger: "hung"}), fakes.ground(script={danger: "hung"})
    result = _play(fakes, request, store, [first, second], trials=3)
    assert result.counts.hang == 3
    assert first.calls[-1] == "close"
    assert second.calls.count("capture") == 0, "a hang that was captured before is only counted"
    assert second.calls.count("unwedge") == 2


def test_a_hang_at_another_step_is_captured_too(fakes: Any, request_for: Build, store: RunStore) -> None:
    ground = fakes.ground(script={1: ["hung"], 2: ["done", "hung"] * 3})
    result = _play(fakes, request_for(), store, ground, trials=3, allow_dump=False)
    assert result.counts.hang == 2
    assert result.counts.clean == 1
    assert ground.calls.count("capture") == 2


def test_a_hang_outweighs_a_wrong_result_and_a_wrong_result_a_clean_trial(fakes: Any, request_for: Build, store: RunStore) -> None:
    ground = fakes.ground(script={1: ["wrong"], 2: ["hung"]})
    result = _play(fakes, request_for(), store, ground, trials=3, allow_dump=False)
    assert (result.counts.other, result.counts.hang, result.counts.clean) == (1, 1, 1)
    assert result.outcome == "hang"


def test_the_run_deadline_leaves_trials_unfinished_and_the_answer_open(fakes: Any, request_for: Build, store: RunStore) -> None:
    clock = FakeClock()
    ground = fakes.ground(clock=clock)
    request = request_for()
    result = run_workload(
        request,
        lambda: ground,
        store,
        RunSettings(trials=5, timeout_s=2.5),
        diagnose=fakes.diagnose,
        watch=fakes.watched(),
        clock=clock,
    )
    assert result.outcome == "inconclusive"
    assert result.counts.unfinished == 5
    assert ground.calls[-1] == "close"


def test_detection_and_diagnosis_are_timed(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    clock = FakeClock()
    ground = fakes.ground(script={_danger(request): "hung"})
    slow = ground.capture

    def capture(*arguments: Any, **more: Any) -> Any:
        clock.advance(0.8)
        return slow(*arguments, **more)

    ground.capture = capture
    result = run_workload(
        request, lambda: ground, store, RunSettings(allow_dump=False), diagnose=fakes.diagnose, watch=fakes.watched(), clock=clock
    )
    assert result.timing == {"launch_to_hung_s": 0.0015, "hung_to_diagnosis_s": 1.6}


@pytest.mark.parametrize("place", ["open", "step 2", "capture", "capture+dump", "unwedge"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), NoDeviceError("gone")])
def test_whatever_is_raised_the_workload_is_closed_and_the_timeline_says_so(
    fakes: Any, request_for: Build, store: RunStore, place: str, error: BaseException
) -> None:
    request = request_for()
    ground = fakes.ground(script={_danger(request): "hung"}, raises={place: error})
    with pytest.raises(type(error)):
        _play(fakes, request, store, ground)
    assert ground.calls[-1] == "close"
    last = _timeline(store)[-1]
    assert last["kind"] == "end"
    assert last["error"] == type(error).__name__


@pytest.mark.parametrize("gone", [BrokenPipeError("pipe"), OSError(5, "the terminal is gone"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), NoDeviceError("gone")])
def test_the_workload_is_closed_also_where_nobody_can_be_told(
    fakes: Any,
    request_for: Build,
    store: RunStore,
    monkeypatch: pytest.MonkeyPatch,
    gone: BaseException,
    error: BaseException | None,
) -> None:
    """A terminal that hung up, a pipe whose reader left: a server of ours would keep its GPUs."""

    def waiting(_self: Any, what: str) -> None:
        if what == "ending the workload":
            raise gone

    monkeypatch.setattr(fakes.watched, "waiting", waiting)
    ground = fakes.ground(raises={"step 2": error} if error is not None else {})
    with pytest.raises(type(gone)):
        _play(fakes, request_for(), store, ground)
    assert ground.calls.count("close") == 1
    kinds = [line["kind"] for line in _timeline(store)]
    assert kinds[-2:] == (["close", "end"] if error is not None else kinds[-2:])
    assert "close" in kinds


@pytest.mark.parametrize("state", ["hung", "fault"])
@pytest.mark.parametrize("place", ["open", "step 1"])
def test_what_an_earlier_trial_found_stays_the_answer(
    fakes: Any, request_for: Build, store: RunStore, state: str, place: str
) -> None:
    """The next trial's process cannot be had (somebody else took the card): the hang is not thrown away with it."""
    request = request_for()
    danger = _danger(request)
    first = fakes.ground(script={danger: state})
    second = fakes.ground(raises={place: NoDeviceError("the card is taken")})
    result = _play(fakes, request, store, [first, second], trials=4)
    assert result.outcome == ("hang" if state == "hung" else "other")
    assert (result.counts.hang + result.counts.other, result.counts.unfinished) == (1, 3)
    assert any(item.what == "trials 2 to 4" and "the card is taken" in item.why for item in result.diagnosis.unread)
    assert second.calls[-1] == "close"


def test_a_first_trial_that_fails_is_still_an_error(fakes: Any, request_for: Build, store: RunStore) -> None:
    with pytest.raises(NoDeviceError):
        _play(fakes, request_for(), store, fakes.ground(raises={"step 1": NoDeviceError("gone")}), trials=4)


def test_a_failing_close_does_not_hide_the_first_error(fakes: Any, request_for: Build, store: RunStore) -> None:
    ground = fakes.ground(raises={"step 1": NoDeviceError("lost"), "close": RunStoreError("full")})
    with pytest.raises(NoDeviceError, match="lost") as caught:
        _play(fakes, request_for(), store, ground)
    assert any("full" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("place", ["capture", "unwedge", "capture+dump", "close"])
def test_a_hang_is_still_a_hang_when_the_disk_is_full(fakes: Any, request_for: Build, store: RunStore, place: str) -> None:
    request = request_for()
    full = RunStoreError("cannot append: the disk or the quota is full", path="timeline.jsonl")
    ground = fakes.ground(script={_danger(request): "hung"}, raises={place: full})
    result = _play(fakes, request, store, ground)
    assert result.outcome == "hang"
    assert result.counts.hang == 1
    assert ground.calls[-1] == "close"
    if place != "close":
        assert any(item.what == "evidence" and "disk" in item.why for item in result.diagnosis.unread)


def test_a_full_disk_without_a_hang_is_its_own_error(fakes: Any, request_for: Build, store: RunStore) -> None:
    ground = fakes.ground(raises={"step 1": RunStoreError("full")})
    with pytest.raises(RunStoreError, match="full"):
        _play(fakes, request_for(), store, ground)
    assert ground.calls[-1] == "close"


def test_evidence_of_a_hang_is_indexed_with_its_hash(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    ground = fakes.ground(script={_danger(request): "hung"})
    result = _play(fakes, request, store, ground)
    ids = [item.id for item in result.diagnosis.evidence]
    assert ids == ["E1", "E2"]
    for item in result.diagnosis.evidence:
        assert item.path is not None
        assert (store.path / item.path).is_file()
    assert result.diagnosis.evidence[0].path == "evidence/hang-1/row-states.bin"


def test_what_could_not_be_read_at_the_start_is_in_the_diagnosis(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    ground = fakes.ground(script={_danger(request): "hung"})
    opened = ground.open
    gap = {"what": "GPM", "why": "not supported", "remedy": "a Hopper card"}

    def open_with_a_gap(*arguments: Any) -> Any:
        ready = opened(*arguments)
        return type(ready)(ready.description, {**ready.environment, "unread": [gap]})

    ground.open = open_with_a_gap
    result = _play(fakes, request, store, ground)
    assert [(item.what, item.remedy) for item in result.diagnosis.unread] == [("GPM", "a Hopper card")]


def test_the_watcher_sees_every_step(fakes: Any, request_for: Build, store: RunStore) -> None:
    request = request_for()
    watch = fakes.watched()
    run_workload(request, fakes.ground, store, RunSettings(trials=2), diagnose=fakes.diagnose, watch=watch, clock=FakeClock())
    expected = [(trial, step.index) for trial in (1, 2) for step in request.steps]
    assert watch.steps == expected
    assert any("setting up" in what for what in watch.waited)


def test_steps_are_those_of_the_plan(request_for: Build) -> None:
    assert all(isinstance(step, DecodeStep) for step in request_for().steps)
