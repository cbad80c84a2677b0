"""How a start stands by its log and its age: another start's words are not this one's."""

from __future__ import annotations

import os

from dsv4_repro.repro.serving.log_history import LogTail
from dsv4_repro.repro.serving.records import Assessment, Blind, DeviceSample, EngineSample, Snapshot
from dsv4_repro.repro.serving.standing import CARDS_GUESSED, standing
from dsv4_repro.repro.serving.start_state import StartState, process_age_s, start_state

SETTINGS = "(APIServer pid=9) INFO 11-29 22:03:04 [api_utils.py:273] non-default args: {'model': '/m', 'cudagraph': 1}\n"
LOADS = "(Worker pid=11) INFO 11-29 22:03:54 [gpu_model_runner.py:5092] Starting to load model /tmp/m...\n"
SERVES = "(APIServer pid=9) INFO:     Application startup complete.\n"
NOW = 1_000_000.0


def _tail(text: str, age: float = 3.0) -> LogTail:
    return LogTail(text, 0, NOW - age)


def test_the_phase_is_that_of_the_last_start_in_the_file() -> None:
    found = start_state(_tail(SETTINGS + LOADS + SERVES + SETTINGS + LOADS), age_s=60.0, now=NOW)
    assert found is not None
    assert (found.phase, found.is_starting) == ("load", True)
    assert found.lines()[0] == "log: phase load: it waits for the weights to be loaded, its last line is 3 s old"
    serving = start_state(_tail(SETTINGS + LOADS + SERVES), age_s=60.0, now=NOW)
    assert serving is not None
    assert not serving.is_starting


def test_a_log_from_before_the_process_is_not_its_own() -> None:
    found = start_state(_tail(SETTINGS + LOADS, age=500.0), age_s=100.0, now=NOW)
    assert found == StartState("", "", 100.0)
    assert not found.is_starting, "100 s old, and nothing says what it does"
    assert start_state(None, age_s=None, now=NOW) is None
    young = start_state(None, age_s=10.0, now=NOW)
    assert young is not None
    assert young.is_starting


def test_a_start_that_is_silent_for_long_or_has_failed_is_none() -> None:
    silent = start_state(_tail(SETTINGS + LOADS, age=1000.0), age_s=2000.0, now=NOW)
    assert silent is not None
    assert not silent.is_starting
    failed = start_state(
        _tail(
            SETTINGS + LOADS + "(EngineCore pid=10) ERROR 11-29 22:04:00 [core.py:1] EngineCore failed to start.\nValueError: no\n"
        ),
        age_s=60.0,
        now=NOW,
    )
    assert failed is not None
    assert failed.failed.startswith("ValueError: no")
    refused = [Snapshot(100.0 + n, engine=EngineSample(100.0 + n, error="refused")) for n in range(3)]
    assert standing(refused, Assessment("starting", 102.0, 100.0), None, failed).state == "ended"
    assert standing(refused, Assessment("starting", 102.0, 100.0), None, silent).state == "unknown"


def test_cards_that_are_only_guessed_say_nothing_against_a_hang() -> None:
    def shots(second: int, blind: tuple[Blind, ...]) -> list[Snapshot]:
        return [
            Snapshot(
                100.0 + n,
                engine=EngineSample(100.0 + n, health=200, running=3, waiting=0, generation_tokens=60.0),
                devices=tuple(
                    DeviceSample(100.0 + n, index, utilisation=used, memory_utilisation=0, power_w=80.0)
                    for index, used in enumerate((100, second))
                ),
                blind=blind,
            )
            for n in range(3)
        ]

    guessed = (Blind(CARDS_GUESSED, "not known"),)
    assert standing(shots(0, ())).against
    found = standing(shots(0, guessed))
    assert (found.against, found.device_signals) == ((), ())
    assert len(standing(shots(100, guessed)).device_signals) == 2


def test_the_age_of_a_process_is_known() -> None:
    age = process_age_s(os.getpid())
    assert age is not None
    assert 0 < age < 1e6
    assert process_age_s(1 << 30) is None
