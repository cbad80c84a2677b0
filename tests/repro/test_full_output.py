"""A full disk behind standard output: status 5 and one sentence, no traceback, whatever the verb was about to say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dsv4_repro.repro.child import package_path


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["list", "--json"], ["autopsy", "/nowhere", "--json"]])
def test_it_is_said_in_one_sentence(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": package_path()}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "dsv4_repro.repro", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment,
        )  # fmt: skip
    assert ended.returncode == (2 if "/nowhere" in arguments else 5), ended.stderr
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "our own fault" not in ended.stderr
