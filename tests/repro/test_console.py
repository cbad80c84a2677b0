"""One screen for terminals, pipes and CI logs."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.clock import FakeClock
from dsv4_repro.repro.console import Screen, printable, wrap


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _screen(*, as_json: bool = False, clock: FakeClock | None = None) -> tuple[Screen, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Screen(as_json=as_json, stdout=out, stderr=err, clock=clock or FakeClock()), out, err


def test_text_goes_to_standard_output_and_with_json_to_standard_error() -> None:
    screen, out, err = _screen()
    screen.say("verdict", style="bad")
    screen.document({"a": 1})
    assert (out.getvalue(), err.getvalue()) == ("verdict\n", "")
    screen, out, err = _screen(as_json=True)
    screen.say("verdict")
    screen.document({"a": 1})
    assert json.loads(out.getvalue()) == {"a": 1}
    assert err.getvalue() == "verdict\n"


def test_progress_in_a_log_is_a_plain_line_every_few_seconds() -> None:
    clock = FakeClock()
    screen, out, err = _screen(clock=clock)
    for step in range(20):
        screen.progress(f"step {step}")
        clock.advance(1.0)
    screen.say("done")
    assert err.getvalue().splitlines() == ["step 0", "step 5", "step 10", "step 15", "step 19"]
    assert out.getvalue() == "done\n"
    assert "\r" not in err.getvalue()
    assert "\x1b" not in err.getvalue()


@pytest.mark.parametrize("variable", ["NO_COLOR", ""])
def test_a_terminal_gets_colour_unless_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    out = _Terminal()
    screen = Screen(stdout=out, stderr=_Terminal())
    screen.say("verdict", style="bad")
    assert ("31m" in out.getvalue()) is (variable == "")
    assert "verdict" in out.getvalue()


def test_progress_on_a_terminal_is_cleared_before_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    out, err = _Terminal(), _Terminal()
    screen = Screen(stdout=out, stderr=err)
    screen.progress("step [bold]1[/bold] of 2")
    screen.progress("step [red]2[/red] of 2")
    screen.say("done")
    assert "step [red]2[/red] of 2" in err.getvalue()
    assert err.getvalue().endswith("\x1b[2K")
    assert out.getvalue() == "done\n"


def test_markup_and_long_lines_are_left_alone() -> None:
    screen, out, _ = _screen()
    line = "[red]/a/path" + "/x" * 200 + " :smile:"
    screen.say(line)
    assert out.getvalue() == line + "\n"


@given(st.text(max_size=200))
def test_printable_text_cannot_drive_a_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()


def test_printable_cuts_and_says_so() -> None:
    assert printable("x" * 50, limit=10) == "x" * 10 + " … (40 more characters)"
    assert printable("\x1b[31m\u202e\n") == "\\x1b[31m\\u202e\\n"


def test_wrapped_lines_fit_80_columns_and_keep_paths_whole() -> None:
    path = "/very/long" * 20
    lines = wrap("word " * 40 + path, indent="  ")
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert any(path in line for line in lines)
    assert wrap("") == [""]


def test_nothing_that_is_said_drives_the_terminal_whoever_forgot_it() -> None:
    out, err = io.StringIO(), io.StringIO()
    hostile = "a\x1b]0;x\x07b\x9b2Jc\u202ed\x7f\ttab\nnext\r"
    Screen(stdout=out, stderr=err).say(hostile)
    Screen(as_json=True, stdout=out, stderr=err).document({"reason": hostile})
    for text in (out.getvalue(), err.getvalue()):
        assert all(char.isprintable() or char in "\n\t" for char in text)
    assert "a\\x1b]0;x\\x07b\\x9b2Jc\\u202ed\\x7f        tab\nnext\\r\n" in out.getvalue()
    assert json.loads(out.getvalue().partition("{")[1] + out.getvalue().partition("{")[2]) == {"reason": hostile}


@pytest.mark.parametrize("begins", ["run directory: ", "Paste this back: ", "what was seen until then is in ", "next: "])
def test_what_is_to_be_pasted_stays_on_one_line_also_with_spaces_in_it(begins: str) -> None:
    line = begins + "/srv/a folder of " + "somebody " * 12 + "/runs/drain/20260101T000000Z-abc123"
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(stdout=out, stderr=err)
    screen.tell([line], indent="  ")
    screen.note(line)
    assert out.getvalue() == err.getvalue() == line + "\n"
