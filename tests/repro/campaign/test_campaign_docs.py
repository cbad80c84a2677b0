"""docs/campaigns.md: every command parses, every plan loads, every job file is one."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.repro.campaign.plan import load_hunt_plan
from dsv4_repro.repro.cli import build

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "campaigns.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for name, text in BLOCKS if name == kind]


def commands() -> list[str]:
    """What stands after ``dsv4-repro`` on any line, up to what a shell would take for something else."""
    found = re.findall(
        r"(?:^|[ /])dsv4-repro ((?:verify|hunt|minimise|bisect|run|show)\b[^\n]*)",
        "\n".join(text for _name, text in BLOCKS),
        re.MULTILINE,
    )
    cleaned = []
    for text in found:
        text = re.sub(r"\s+#.*|\s*>>.*|'$", "", text).replace("$compare", "")
        text = re.sub(r'"\$\(python.*', "x.so", text)
        cleaned.append(re.sub(r"\$\([^)]*\)", "DAY", text))
    return cleaned


@pytest.mark.parametrize("text", commands())
def test_every_command_is_one_of_the_program(text: str) -> None:
    verb, *words = shlex.split(text)
    command = build().commands[verb]
    if hasattr(command, "commands"):
        verb, *words = words
        command = command.commands[verb]
    command.make_context(verb, words)


def test_there_are_commands_for_all_four_verbs() -> None:
    assert {text.split()[0] for text in commands()} >= {"verify", "hunt", "minimise", "bisect"}


def test_the_plan_is_a_plan(tmp_path: Path) -> None:
    first, server = blocks("toml")
    path = tmp_path / "nightly.toml"
    path.write_text(first)
    plan = load_hunt_plan(path)
    assert plan.cells == 3 * 2 * 3 * 3 * 5 * 2
    assert plan.budget.minutes == 30
    path.write_text(server)
    plan = load_hunt_plan(path)
    assert (plan.on, plan.cells) == ("server", 3 * 2 * 2 * 2)
    for number in range(plan.cells):
        plan.cell(number).drain(1)


def test_the_workflow_is_yaml_and_runs_the_hunt() -> None:
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
    document = yaml.safe_load(blocks("yaml")[0])
    steps = document["jobs"]["hunt"]["steps"]
    assert any("dsv4-repro hunt nightly.toml" in step.get("run", "") for step in steps)
    assert document[True]["schedule"][0]["cron"].split() == ["17", "2", "*", "*", "*"]  # YAML 1.1 reads the key "on" as true
    assert all(("uses" in step) != ("run" in step) for step in steps)


def test_the_crontab_line_has_five_fields_and_no_bare_percent() -> None:
    (line,) = blocks("crontab")[0].strip().splitlines()
    fields = line.split(maxsplit=5)
    assert all(re.fullmatch(r"[\d*]+", field) for field in fields[:5])
    assert not re.search(r"(?<!\\)%", fields[5]), "cron ends the command at a bare percent sign"


def test_the_units_are_units() -> None:
    service, timer = blocks("ini")
    parsed = []
    for text in (service, timer):
        parser = configparser.ConfigParser(interpolation=None, strict=True)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(text)
        parsed.append(parser)
    assert parsed[0]["Service"]["ExecStart"].startswith("/")
    assert parsed[0]["Service"]["Type"] == "oneshot"
    assert parsed[1]["Timer"]["OnCalendar"] == "*-*-* 02:17:00"
    assert parsed[1]["Install"]["WantedBy"] == "timers.target"
