"""A run's record says by which versions it was made, whatever ground it ran on."""

from __future__ import annotations

import ast
import platform
from pathlib import Path

import pytest

import dsv4_repro
from dsv4_repro.repro import machine
from dsv4_repro.repro.machine import package_versions, run_versions

PACKAGE = Path(dsv4_repro.__file__).parent


def test_python_this_package_and_what_is_installed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_versions()
    assert found["python"] == platform.python_version()
    assert found["numpy"] == package_versions()["numpy"]
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-distribution",))
    assert run_versions() == {"python": platform.python_version(), "dsv4-repro": dsv4_repro.__version__}


def test_every_record_of_a_run_is_begun_with_the_versions_of_one_function() -> None:
    calls = [
        (
            f"{path.relative_to(PACKAGE)}:{node.lineno}",
            [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "versions"],
        )
        for path in sorted(PACKAGE.glob("repro/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RunRecord"
    ]
    assert len(calls) >= 7
    # What was made elsewhere (evidence that is judged, a server that is watched) has nothing of what is installed beside us.
    elsewhere = {place for place, versions in calls if versions == ["{'dsv4-repro': __version__}"]}
    assert {place.partition(":")[0] for place in elsewhere} == {"repro/autopsy.py", "repro/serving/hang_run.py"}
    assert [place for place, versions in calls if versions != ["run_versions()"] and place not in elsewhere] == []
