"""Which of a row's launches is its answer: every sequence of endings, for a defect's row and for a repair's."""

from __future__ import annotations

import itertools

import pytest

from dsv4_repro.clock import SYSTEM, Deadline
from dsv4_repro.forensics.records import CLASSES, Diagnosis, Evidence
from dsv4_repro.repro.row_tries import Ended, Keep, Tried, try_schedules
from dsv4_repro.scenarios.launches import HostLaunch, Row

SPIN, WRONG, CLEAN = ("gpu-spin-barrier", "reset-race"), ("wrong-result", None), ("not-hung", None)
WHAT = HostLaunch(1, 4096, 4096, 512, "H200", "0.26.0")
ROWS = {
    "defect": Row("defect", WHAT, "gpu-spin-barrier", "a defect", "reset-race", also=(WRONG,)),
    "repair": Row("repair", WHAT, "not-hung", "a repair", fixed=True, also=(WRONG,)),
}
SEQUENCES = [endings for most in range(1, 5) for endings in itertools.product([CLEAN, WRONG, SPIN], repeat=most)]


def keep(kind: str, name: str, content: bytes | str) -> Evidence:
    raise AssertionError("nothing is kept here")


def run(
    kind: str, endings: tuple[tuple[str, str | None], ...], *, count_all: bool = False, deadline: Deadline | None = None
) -> tuple[Tried, list[bool]]:
    """What was tried, and which launches were given something to keep evidence with."""
    asked: list[bool] = []

    def launch(number: int, kept: Keep | None) -> Ended:
        assert number == len(asked)
        asked.append(kept is not None)
        class_, cause = endings[number]
        diagnosis = Diagnosis.model_validate({
            "outcome": CLASSES[class_][1], "ground": "cpu", "unread": [{"what": "waits", "why": "no machine is run here"}],
            "verdict": {"class": class_, "cause": cause, "confidence": "high", "sentence": "so"},
        })  # fmt: skip
        return Ended(diagnosis, {"number": number})

    tried = try_schedules(
        ROWS[kind], len(endings), launch, count_all=count_all, keep=keep, deadline=deadline, progress=lambda _text: None
    )  # fmt: skip
    return tried, asked


@pytest.mark.parametrize("count_all", [False, True])
@pytest.mark.parametrize("kind", ["defect", "repair"])
def test_the_answer_of_every_sequence(kind: str, count_all: bool) -> None:
    for endings in SEQUENCES:
        tried, asked = run(kind, endings, count_all=count_all)
        decided = endings.index(SPIN) if SPIN in endings else None
        made = len(endings) if count_all or decided is None else decided + 1
        assert (tried.launches, len(asked)) == (made, made), endings
        assert asked == [decided is None or number <= decided for number in range(made)], endings
        # What is neither well nor passed over decides; else a repair is judged by a launch that ended well, a defect by one that
        # showed something of it.
        order = [CLEAN, WRONG] if kind == "repair" else [WRONG, CLEAN]
        answer = SPIN if decided is not None else next(ending for ending in order if ending in endings)
        verdict = tried.first.diagnosis.verdict
        assert (verdict.class_, verdict.cause) == answer, endings
        assert endings[tried.first.detail["number"]] == answer
        assert dict(tried.counts) == {ending: endings[:made].count(ending) for ending in set(endings[:made])}


@pytest.mark.parametrize("endings", [(WRONG, CLEAN), (CLEAN, WRONG), (WRONG, WRONG, CLEAN)])
def test_a_repair_is_as_expected_whichever_order_shows_its_other_defect(endings: tuple[tuple[str, str | None], ...]) -> None:
    assert run("repair", endings)[0].as_expected


def test_one_launch_is_made_when_the_time_is_over() -> None:
    tried, _ = run("defect", (CLEAN, SPIN), deadline=Deadline(0.0, SYSTEM))
    assert tried.launches == 1
