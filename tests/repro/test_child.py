"""The parent's side of a child process: handshake, deadlines, ends, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4_repro import errors
from dsv4_repro.errors import DeadlineError, InconclusiveError, NoDriverError
from dsv4_repro.forensics.collect.proc import process_state
from dsv4_repro.kernels.driver import CudaCallError
from dsv4_repro.repro.child import Child, ChildGoneError, package_path, raise_from

#: A child that speaks the protocol: argv is FD, …, PARENT.
HEAD = """
import os, signal, sys, time
from dsv4_repro.kernels.channel import CLOSED, Channel
from dsv4_repro.kernels.device_child import be_a_good_child
be_a_good_child(int(sys.argv[-1]))
channel = Channel.of_descriptor(int(sys.argv[1]))
"""
SERVE = """
cuda = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
channel.send({"type": "hello", "pid": os.getpid(), "session": os.getsid(0), "args": sys.argv[2:-1]})
while True:
    message = channel.receive(0.2)
    if message is CLOSED:
        os._exit(4)
    if message is None:
        continue
    if message["cmd"] == "exit":
        os._exit(0)
    channel.send({"type": "progress"})
    if message["cmd"] == "fail":
        channel.send({"type": "error", "re": "fail", "kind": "NoDriverError", "message": "none here", "help": "get one"})
    elif message["cmd"] == "die":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV if message.get("hard") else signal.SIGTERM)
    elif message["cmd"] != "silence":
        channel.send({"type": "answer", "cmd": message["cmd"], "env": cuda})
"""


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def start(text: str = SERVE, **more: object) -> Child:
        path = tmp_path / f"child{len(made)}.py"
        path.write_text(HEAD + text)
        child = Child.spawn("", ["7"], tmp_path / f"run{len(made)}", command=[sys.executable, "-P", str(path)], **more)  # type: ignore[arg-type]
        made.append(child)
        return child

    yield start
    for child in made:
        child.close(ask=False, grace_s=0.2)


def test_hello_ask_and_leave(spawn: Callable[..., Child]) -> None:
    child = spawn()
    seen: list[object] = []
    child.on_message = seen.append
    hello = child.await_message("hello", 10)
    assert (hello["pid"], hello["args"]) == (child.pid, ["7"])
    assert hello["session"] == child.pid, "its own session: Ctrl-C of the terminal does not reach it"
    assert child.ask({"cmd": "one"}, "answer", 5)["cmd"] == "one"
    assert seen == [{"type": "progress"}]
    assert child.close() == "clean"
    assert child.status == 0
    assert child.close() == "clean"


def test_an_error_keeps_its_type_text_and_remedy(spawn: Callable[..., Child]) -> None:
    child = spawn()
    child.await_message("hello", 10)
    with pytest.raises(NoDriverError, match="none here") as caught:
        child.ask({"cmd": "fail"}, "answer", 5)
    assert caught.value.help_text == "get one"


@pytest.mark.parametrize("kind", [name for name in errors.__all__ if not issubclass(getattr(errors, name), errors.EvidenceError)])
def test_every_error_of_ours_crosses_the_pipe(kind: str) -> None:
    with pytest.raises(getattr(errors, kind), match="text"):
        raise_from({"kind": kind, "message": "text", "help": ""})


def test_errors_of_others_cross_it_too() -> None:
    with pytest.raises(InconclusiveError, match="ZeroDivisionError: text"):
        raise_from({"kind": "ZeroDivisionError", "message": "text"})
    with pytest.raises(CudaCallError) as caught:
        raise_from({"kind": "UnavailableError", "call": "cuEventQuery", "code": "CUDA_ERROR_LAUNCH_FAILED", "message": "x"})
    assert caught.value.sticky


def test_deadlines_of_start_and_of_an_answer_are_two(spawn: Callable[..., Child]) -> None:
    slow = spawn("time.sleep(30)")
    with pytest.raises(DeadlineError, match=r"no 'hello' within 0\.2 s"):
        slow.await_message("hello", 0.2)
    child = spawn()
    child.await_message("hello", 10)
    with pytest.raises(DeadlineError, match=r"state [RS]"):
        child.ask({"cmd": "silence"}, "answer", 0.2)


@pytest.mark.parametrize(("hard", "name"), [(False, "SIGTERM"), (True, "SIGSEGV")])
def test_a_child_that_dies_is_told_with_its_last_words(spawn: Callable[..., Child], hard: bool, name: str) -> None:
    child = spawn()
    child.await_message("hello", 10)
    with pytest.raises(ChildGoneError, match=name) as caught:
        child.ask({"cmd": "die", "hard": hard}, "answer", 5)
    assert caught.value.status == (-signal.SIGSEGV if hard else -signal.SIGTERM)
    assert "last words" in child.stderr_tail()
    with pytest.raises(ChildGoneError):
        child.ask({"cmd": "one"}, "answer", 1)
    assert child.close() == "clean"


def test_a_child_that_ends_before_its_hello(spawn: Callable[..., Child]) -> None:
    child = spawn("raise SystemExit('no such thing')")
    with pytest.raises(ChildGoneError, match=r"exit status 1.*no such thing"):
        child.await_message("hello", 10)


def test_one_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(InconclusiveError, match="cannot be started"):
        Child.spawn("", [], tmp_path, command=["/nowhere/python"])


@pytest.mark.parametrize("error", [ValueError("embedded null byte"), OSError(7, "too long"), KeyboardInterrupt()])
def test_no_descriptor_is_left_by_one_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise error

    pairs: list[socket.socket] = []
    make = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        made = make()
        pairs.extend(made)
        return made

    monkeypatch.setattr(socket, "socketpair", pair)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InconclusiveError):
        Child.spawn("", [], tmp_path)
    assert [end.fileno() for end in pairs] == [-1, -1]


def test_a_zero_byte_in_an_argument_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InconclusiveError, match=r"cannot be started: .*null byte"):
        Child.spawn("", ["a\0b"], tmp_path)


def test_ending_goes_from_asking_to_terminating_to_killing(spawn: Callable[..., Child]) -> None:
    deaf = spawn("channel.send({'type': 'hello'})\ntime.sleep(60)")
    deaf.await_message("hello", 10)
    assert deaf.close(grace_s=0.2) == "terminated"
    stubborn = spawn("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nchannel.send({'type': 'hello'})\nwhile True: time.sleep(1)")
    stubborn.await_message("hello", 10)
    assert stubborn.close(grace_s=0.2) == "killed"
    assert process_state(stubborn.pid) is None


def test_one_that_outlives_sigkill_is_a_finding(spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    child = spawn("channel.send({'type': 'hello'})\ntime.sleep(60)")
    child.await_message("hello", 10)
    sent: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda _group, number: sent.append(number))
        assert child.close(grace_s=0.1, kill_wait_s=0.1) == "survived"
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert child.close(grace_s=0.5) == "terminated", "asked again, it is tried again"


def test_its_own_children_go_with_it(spawn: Callable[..., Child]) -> None:
    child = spawn(
        "import subprocess\np = subprocess.Popen(['sleep', '60'])\n"
        "channel.send({'type': 'hello', 'grandchild': p.pid})\ntime.sleep(60)"
    )
    grandchild = int(child.await_message("hello", 10)["grandchild"])
    assert process_state(grandchild) not in (None, "Z")
    child.close(grace_s=0.2)
    deadline = time.monotonic() + 5
    while process_state(grandchild) not in (None, "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_state(grandchild) in (None, "Z")


@pytest.mark.parametrize("reached_by", ["SIGTERM", "only SIGKILL"])
def test_what_a_child_leaves_in_its_group_when_it_ends_cleanly_is_ended_too(spawn: Callable[..., Child], reached_by: str) -> None:
    deaf = "" if reached_by == "SIGTERM" else "trap '' TERM; "
    child = spawn(
        f"import subprocess\nwords = ['sh', '-c', \"{deaf}echo; while :; do sleep 0.1; done\"]\n"
        "p = subprocess.Popen(words, stdout=subprocess.PIPE)\np.stdout.read(1)\n"
        "channel.send({'type': 'hello', 'grandchild': p.pid})\n"
        "while channel.receive(0.2) is None: pass\nos._exit(0)"
    )
    grandchild = int(child.await_message("hello", 10)["grandchild"])
    assert process_state(grandchild) not in (None, "Z")
    assert child.close(grace_s=5) == "clean", "the answer is how the child itself ended"
    assert child.status == 0
    deadline = time.monotonic() + 5
    while process_state(grandchild) not in (None, "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_state(grandchild) in (None, "Z")


def test_a_group_number_that_is_somebody_elses_by_now_is_left_alone(
    spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = spawn("os._exit(0)")
    while child.status is None:
        time.sleep(0.01)
    sent: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda _group, number: sent.append(number))
        patch.setattr("dsv4_repro.repro.child.process_state", lambda _pid: "S")
        assert child.close() == "clean"
    assert sent == []


def test_the_tail_of_stderr_reads_only_the_tail(spawn: Callable[..., Child]) -> None:
    child = spawn("os._exit(0)")
    while child.status is None:
        time.sleep(0.01)
    with child.stderr_path.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: nobody reads this whole
        stream.seek(0, os.SEEK_END)
        stream.write(b"the last words\n")
    assert child.stderr_tail(15) == "the last words"
    child.stderr_path.write_bytes(b"short\n")
    assert child.stderr_tail() == "short"
    child.stderr_path.unlink()
    assert child.stderr_tail() == ""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "child.py"
    path.write_text(HEAD + "channel.send({'type': 'hello'})\ntime.sleep(60)")
    parent = f"""
import sys, time
from pathlib import Path
from dsv4_repro.repro.child import Child
child = Child.spawn("", [], Path({str(tmp_path)!r}), command=[sys.executable, "-P", {str(path)!r}])
child.await_message("hello", 20)
print(child.pid, flush=True)
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": package_path()}
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while process_state(pid) not in (None, "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_state(pid) in (None, "Z")


def test_variables_that_would_change_what_is_observed_do_not_reach_it(
    spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_DEVICE_WAITS_ON_EXCEPTION", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    child = spawn(environment={"CUDA_COREDUMP_FILE": "x"})
    child.await_message("hello", 10)
    assert child.ask({"cmd": "env"}, "answer", 5)["env"] == {
        "CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_COREDUMP_FILE": "x",
    }  # fmt: skip


def test_interrupt_reaches_the_parent_alone(spawn: Callable[..., Child]) -> None:
    child = spawn()
    child.await_message("hello", 10)
    os.kill(child.pid, signal.SIGINT)
    assert child.ask({"cmd": "one"}, "answer", 5)["cmd"] == "one"
