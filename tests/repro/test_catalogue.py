"""list and show: words, document, and what is said of this machine."""

from __future__ import annotations

import json

import pytest

from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.catalogue import list_document, list_lines, show_lines
from dsv4_repro.scenarios.registry import all_scenarios, scenario

HERE = {"gpu": "no NVIDIA driver", "cpu": "yes", "server": "needs vLLM and a GPU, or --url"}


def test_list_says_where_each_can_run_here() -> None:
    text = " ".join(" ".join(list_lines(all_scenarios(), HERE)).split())
    assert "drain A draining MTP batch wedges the persistent top-k (vLLM #51593)" in text
    assert "gpu-spin-barrier/peer-left" in text
    assert "gpu: no NVIDIA driver" in text
    document = list_document(all_scenarios(), HERE)
    assert document["scenarios"][0]["here"]["cpu"] == "yes"


def test_show_tells_story_fixes_and_grounds_in_80_columns() -> None:
    lines = show_lines(scenario("drain"), HERE)
    text = " ".join(" ".join(lines).split())
    assert "-1 stays -1" in text
    assert "fix (producer)" in text
    assert "--producer clamped" in text
    assert "(here: no NVIDIA driver)" in text
    assert all(len(line) <= 80 for line in lines)


def test_the_verbs_answer_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "dsv4-repro/list/1"
    assert main(["show", "drain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scenario"]["class"] == "gpu-spin-barrier"
    assert "requests" in document["plan_schema"]["properties"]
    assert main(["show", "drain"]) == 0
    shown = capsys.readouterr().out
    assert "min_live" in shown
    assert "None" not in shown, "a default that vLLM computes is shown as what it comes to"
    assert "capture_sizes  1,2,4,8,16,24,32,40,48,56,64 " in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_texts_of_the_plan_s_fields_stand_in_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "drain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("The plan's fields (a flag each, or --plan FILE):") + 1 :]
    goes_on = [line for line in table if line.startswith("   ")]
    assert goes_on
    assert {len(line) - len(line.lstrip()) for line in goes_on} == {table[0].index("Requests")}
