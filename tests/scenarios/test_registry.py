"""Scenarios are found by file, described completely, and in the words of the diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsv4_repro.scenarios
from dsv4_repro.errors import OurFaultError, UsageError
from dsv4_repro.forensics.records import CLASSES
from dsv4_repro.scenarios import registry
from dsv4_repro.scenarios.registry import Scenario, all_scenarios, scenario, scenario_for_signature

LINKS = ("drain", "mtp", "graph-padding", "producer", "compression", "dispatch", "disagreement", "barrier", "host")


def test_every_file_is_a_scenario_of_its_own_name() -> None:
    folder = Path(dsv4_repro.scenarios.__path__[0])
    stems = sorted(path.stem.removesuffix("_scenario").replace("_", "-") for path in folder.glob("*_scenario.py"))
    assert sorted(entry.name for entry in all_scenarios()) == stems
    assert all_scenarios()[0].name == "drain"


@pytest.mark.parametrize("entry", all_scenarios(), ids=lambda entry: entry.name)
def test_a_scenario_says_what_is_expected_in_known_words(entry: Scenario) -> None:
    assert entry.class_ in CLASSES
    assert entry.cause is None or entry.cause in CLASSES[entry.class_][0]
    assert entry.title
    assert entry.story
    assert set(entry.grounds) <= {"server", "gpu", "cpu"}
    assert entry.grounds or entry.not_reproduced
    assert all(fix.text and fix.layer for fix in entry.fixes)


def test_the_defining_case_tells_the_whole_chain_in_order() -> None:
    assert tuple(part.partition(":")[0] for part in scenario("drain").story) == LINKS
    assert [fix.layer for fix in scenario("drain").fixes] == ["producer", "consumer"]


def test_looking_up() -> None:
    assert scenario("drain").signature == "vllm-51593"
    found = scenario_for_signature("vllm-51593")
    assert found is not None
    assert found.name == "drain"
    assert scenario_for_signature(None) is None
    assert scenario_for_signature("nobody-1") is None
    with pytest.raises(UsageError, match="there are: drain"):
        scenario("dr\x1bain")


def test_two_of_one_name_are_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modules", lambda: ["drain_scenario", "drain_scenario"])
    with pytest.raises(OurFaultError, match="two scenarios"):
        all_scenarios()
