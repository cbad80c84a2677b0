"""What explains a stand-still on the host: stopped processes, compilers that burn CPU, a recent line of the log; and what not."""

from __future__ import annotations

import pytest

from dsv4_repro.repro.serving.host_work import HostWork, log_works
from dsv4_repro.repro.serving.records import LogSample, ProcessSample, Snapshot


def _says(*looks: tuple[float, str, str | None, float]) -> str:
    """``looks``: (time, role, state, CPU seconds) of one process."""
    host = HostWork()
    said = ""
    for at, role, state, cpu in looks:
        found = (ProcessSample(at, 7, role, state, cpu),)
        host.look(at, found)
        said = host.says(at, Snapshot(at, processes=found))
    return said


@pytest.mark.parametrize(("role", "state"), [("worker", "T"), ("engine", "t")])
def test_a_stopped_process_is_named(role: str, state: str) -> None:
    assert f"process 7 ({role}) is stopped" in _says((1.0, role, state, 3.0))


def test_a_compiler_explains_as_long_as_it_burns_cpu() -> None:
    assert "burn CPU" in _says((1.0, "compiler", "R", 0.0))
    assert "burn CPU" in _says((1.0, "compiler", "S", 0.0), (2.0, "compiler", "S", 0.9))
    # It waits itself, for a lock whose holder has died, say.
    assert _says((1.0, "compiler", "S", 5.0), (9.0, "compiler", "S", 5.0)) == ""
    assert _says((1.0, "compiler", "S", 0.0), (2.0, "compiler", "S", 0.9), (9.0, "compiler", "S", 0.9)) == ""
    assert _says((1.0, "compiler", "Z", 0.0)) == ""
    assert _says((1.0, "worker", "R", 0.0), (2.0, "worker", "R", 1.0)) == "", "a worker polls while its GPU hangs"


def test_another_server_is_not_explained_by_the_compilers_of_the_one_before() -> None:
    host = HostWork()
    for at, cpu in ((1.0, 0.0), (2.0, 0.9)):
        host.look(at, (ProcessSample(at, 7, "compiler", "S", cpu),))
    host.forget()
    assert host.says(2.5, Snapshot(2.5, processes=(ProcessSample(2.5, 7, "compiler", "S", 0.9),))) == ""


@pytest.mark.parametrize(
    ("log", "explains"),
    [
        (None, False), (LogSample(1.0), False), (LogSample(1.0, work="jit", work_age_s=100.0), True),
        (LogSample(1.0, work="jit", work_age_s=121.0), False), (LogSample(1.0, work="jit"), False),
        (LogSample(1.0, work="load-start", work_age_s=3000.0), True), (LogSample(1.0, work="new kind", work_age_s=61.0), False),
    ],
)  # fmt: skip
def test_a_line_of_the_log_explains_for_as_long_as_such_work_takes(log: LogSample | None, explains: bool) -> None:
    assert bool(log_works(log)) is explains
