"""The CPU ground through the command line: hang, clean, residency, schedules, budgets, faults, bad input. Real code, no GPU."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import BudgetError, ToolMissingError
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.diagnose import diagnose_dump
from dsv4_repro.kernels import build
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.devices import device_for_sm
from dsv4_repro.kernels.elf import read_elf
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.repro import drain_job
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.cpu_ground import CpuGround
from dsv4_repro.repro.kernel_choice import choose_kernel
from dsv4_repro.repro.leftovers import PARENT_VARIABLE, RUN_VARIABLE
from dsv4_repro.repro.prepare import PreparedRun, prepare_drain
from dsv4_repro.repro.runread import open_run, read_timeline
from dsv4_repro.scenarios.drain import DrainPlan

#: Four requests, one leaves: the danger step is the first with three live.
SMALL = ["--requests", "4", "--min-live", "3", "--output", "4:4", "--steps", "8"]
#: Rows that two and more CTAs share, longer than 32768 candidates.
LONG = [
    "--requests",
    "1",
    "--min-live",
    "1",
    "--prompt",
    "140000:140000",
    "--max-model-len",
    "262144",
    "--output",
    "4:4",
    "--steps",
    "2",
]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The timeline of a run directory, every line of which can be read."""
    lines = []
    for line in read_timeline(folder):
        assert isinstance(line, dict), line
        lines.append(line)
    return lines


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module: what is compiled and disassembled once is used by all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_REPRO_CACHE", str(cache))
    monkeypatch.setenv(RUN_VARIABLE, "")
    monkeypatch.setenv(PARENT_VARIABLE, "")
    monkeypatch.chdir(tmp_path)


class Done:
    """One run of the verb: its status, what it wrote, its words in one line."""

    def __init__(self, status: int, folder: Path, out: str, err: str) -> None:
        self.status = status
        self.folder = folder
        self.words = " ".join(out.split())
        self.err = " ".join(err.split())

    @property
    def verdict(self) -> tuple[str, str | None]:
        found = open_run(self.folder).diagnosis
        assert found is not None
        return found.verdict.class_, found.verdict.cause

    @property
    def sentence(self) -> str:
        found = open_run(self.folder).diagnosis
        assert found is not None
        return found.verdict.sentence

    def document(self) -> Any:
        return json.loads((self.folder / "diagnosis.json").read_text())

    def ledger_is_true(self) -> bool:
        """What the diagnosis infers of a dump against what the interpreter knows: nobody is said to have gone who never started."""
        (seen,) = (json.loads(path.read_text()) for path in self.folder.glob("evidence/hang-1/interpreter.json"))
        ledger = self.document()["ledger"]
        assert ledger
        return all(
            set(group["exited"]) <= set(seen["exited"]) and set(group["never_started"]) <= set(seen["never_started"])
            for group in ledger
        )

    def steps(self) -> list[Any]:
        return [line for line in lines_of(self.folder) if line["kind"] in ("step", "hung")]


@pytest.fixture
def drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    count = iter(range(100))

    def run(*arguments: str, plan: list[str] | None = None) -> Done:
        folder = tmp_path / f"run{next(count)}"
        words = ["run", "drain", "--on", "cpu", *(SMALL if plan is None else plan), "--out", str(folder), *arguments]
        status = main(words)
        captured = capsys.readouterr()
        return Done(status, folder, captured.out, captured.err)

    return run


# ---- hang and clean -------------------------------------------------------------------------------------------------------------


def test_the_hang_is_proven_captured_explained_and_released(drain: Callable[..., Done]) -> None:
    run = drain()
    assert run.status == 3
    assert run.verdict == ("gpu-spin-barrier", "peer-left")
    first = "run drain --on cpu (as asked): machine code of sm_120, instruction by instruction, as on a"
    assert run.words.startswith(first)
    assert "(188 SMs x 1 CTA slot; schedule smallest-pc; memory checks off)" in run.words
    document = run.document()
    assert document["verdict"]["signature"] == "vllm-51593"
    assert document["unwedge"]["retired"] is True
    assert document["unwedge"]["milliseconds"] is None
    assert {item["origin"] for item in document["evidence"]} == {"interpreted"}
    assert "measured" not in {link["status"] for link in document["chain"]}
    assert '"measured"' not in json.dumps(document)
    assert document["waits"][0]["address_status"] == "interpreted"
    hung = run.steps()[-1]
    assert hung["detail"]["kind"] == "deadlock"
    assert "proven" in hung["reasons"][0]
    report = (run.folder / "report.md").read_text()
    assert "No GPU was used: the kernel's machine code for sm_120 was interpreted on a CPU" in report


def test_the_dump_is_a_dump_like_any_other(drain: Callable[..., Done], capsys: pytest.CaptureFixture[str]) -> None:
    run = drain()
    (dump,) = run.folder.glob("evidence/hang-1/*.nvcudmp")
    found = diagnose_dump(dump)
    assert (found.verdict.class_, found.verdict.cause) == ("gpu-spin-barrier", "peer-left")
    assert {wait.block[0] for wait in found.waits} == {12}
    assert "measured" not in {link.status for link in found.chain}
    assert main(["autopsy", str(dump)]) == 3
    assert main(["autopsy", str(run.folder)]) == 3
    assert "gpu-spin-barrier / peer-left" in capsys.readouterr().out


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100])
def test_every_architecture_hangs_alike(drain: Callable[..., Done], sm: int) -> None:
    run = drain("--arch", f"sm_{sm}", "--no-dump")
    assert run.status == 3
    assert run.verdict == ("gpu-spin-barrier", "peer-left")


@pytest.mark.parametrize(
    "arguments", [["--kernel", "builtin:guard"], ["--producer", "clamped"], ["--kernel", "builtin:guard", "--checks"]]
)
def test_the_repaired_kernel_and_the_clamping_producer_are_clean(drain: Callable[..., Done], arguments: list[str]) -> None:
    run = drain(*arguments)
    assert run.status == 0
    assert run.verdict[0] == "not-hung"
    assert "the danger window among them" in run.sentence
    assert ("memory checks on" in run.words) == ("--checks" in arguments)


def test_a_plan_without_the_window_says_nothing(drain: Callable[..., Done]) -> None:
    run = drain("--min-live", "4")
    assert run.status == 5
    assert "window not reached" in run.sentence


def test_every_layer_is_released_at_the_same_word(drain: Callable[..., Done]) -> None:
    run = drain("--layers", "5")
    assert run.status == 3
    experiment = run.document()["unwedge"]
    assert experiment["retired"] is True
    assert experiment["detail"]["writes"] == 5
    assert experiment["detail"]["rows_wrong"] == []
    assert experiment["detail"]["padding_rows_wrong"] == [6]
    assert [step["layer"] for step in run.steps() if step["kind"] == "hung"] == [0]


def test_trials_go_on_after_a_release(drain: Callable[..., Done]) -> None:
    run = drain("--trials", "4", "--schedule", "random")
    assert run.status == 3
    counts = run.document()["trials"]
    assert (counts["hang"], counts["unfinished"]) == (4, 0)
    assert len(list(run.folder.glob("evidence/hang-*"))) == 1


# ---- the interpreted device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), [("random", 1), ("random", 2), ("priority", 3)])
def test_random_schedules_come_to_the_same_verdict(drain: Callable[..., Done], schedule: str, seed: int) -> None:
    run = drain("--schedule", schedule, "--seed", str(seed))
    assert f"schedule {schedule} of seed {seed}" in run.words
    assert run.status == 3
    assert run.verdict == ("gpu-spin-barrier", "peer-left")
    assert {tuple(wait["block"]) for wait in run.document()["waits"]} == {(12, 0, 0)}
    assert drain("--schedule", schedule, "--seed", str(seed), "--kernel", "builtin:guard").status == 0


def test_the_recorded_command_makes_the_same_run(drain: Callable[..., Done]) -> None:
    first = drain("--schedule", "random", "--seed", "5", "--checks", "--sms", "4", "--slots-per-sm", "2", "--arch", "sm_90")
    recorded = list(open_run(first.folder).run.command)
    line = shlex.join(recorded)
    for words in ("--schedule random", "--seed 5", "--checks", "--sms 4", "--slots-per-sm 2", "--arch sm_90"):
        assert words in line
    again = drain(*recorded[3:], plan=[])
    assert open_run(again.folder).run.command == tuple(recorded)
    pick = ("step", "state", "layer", "reasons")
    assert [[line[key] for key in pick] for line in again.steps()] == [[line[key] for key in pick] for line in first.steps()]
    counted = [line["detail"]["warp_instructions"] for line in first.steps()]
    assert [line["detail"]["warp_instructions"] for line in again.steps()] == counted


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize("kernel", ["builtin", "builtin:guard"])
def test_too_few_slots_are_not_co_resident_and_not_a_peer_that_left(drain: Callable[..., Done], kernel: str, arch: str) -> None:
    run = drain("--sms", "1", "--slots-per-sm", "1", "--kernel", kernel, "--arch", arch, plan=LONG)
    assert "(1 SM x 1 CTA slot, launches planned for" in run.words
    assert "members of a group may never start" in run.words
    assert run.status == 3
    assert run.verdict == ("gpu-spin-barrier", "not-co-resident")
    waiting = next(group for group in run.document()["ledger"] if group["spinning"])
    assert waiting["never_started"]
    assert not waiting["exited"]
    assert run.ledger_is_true()
    assert drain("--kernel", kernel, "--arch", arch, "--steps", "1", plan=LONG).status == 5


def test_a_leader_whose_peer_never_started_is_not_said_to_be_left(drain: Callable[..., Done]) -> None:
    """One slot, and rows that the peers would leave: that the peer would have left is not what was seen."""
    run = drain("--sms", "1", "--slots-per-sm", "1")
    assert run.status == 3
    assert run.verdict[0] == "gpu-spin-barrier"
    assert run.verdict[1] != "peer-left"
    assert run.ledger_is_true()
    wider = drain("--sms", "2", "--slots-per-sm", "1")
    assert wider.verdict == ("gpu-spin-barrier", "peer-left")
    assert wider.ledger_is_true()


def test_a_named_device_stands_for_its_architecture(drain: Callable[..., Done]) -> None:
    run = drain("--device", "RTX 5090")
    assert "as on an RTX 5090 (170 SMs" in run.words
    assert run.status == 3
    assert drain("--device", "RTX 5090", "--arch", "sm_90").status == 2


@pytest.mark.parametrize(
    "arguments",
    [["--schedule", "fifo"], ["--arch", "sm_1"], ["--arch", "blackwell"], ["--sms", "0"], ["--device", "no such card"]],
)
def test_devices_and_schedules_that_do_not_exist(drain: Callable[..., Done], arguments: list[str]) -> None:
    assert drain(*arguments).status == 2


# ---- budgets and ends -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_budget(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def arrange(budget: int) -> None:
        monkeypatch.setattr(drain_job, "make_ground", lambda _name: CpuGround(budget=budget))

    return arrange


def test_a_used_up_budget_is_no_hang(drain: Callable[..., Done], with_budget: Callable[[int], None]) -> None:
    with_budget(5000)
    run = drain()
    assert run.status == 5
    assert run.verdict == ("unknown", None)
    assert "5000 warp-instructions executed without an end; neither an end nor a hang was shown" in run.sentence
    seen = json.loads((run.folder / "evidence" / "stopped-1" / "interpreter.json").read_text())
    assert seen["kind"] == "budget"
    assert seen["stuck"]
    assert open_run(run.folder).missing == ()


def test_a_kernel_that_never_ends_is_stopped_inside_its_launch(drain: Callable[..., Done]) -> None:
    began = time.monotonic()
    run = drain("--kernel", "builtin:bounded-spin,spin_limit=2000000000", "--timeout", "3")
    assert time.monotonic() - began < 20
    assert run.status == 5
    assert "the run's own deadline came first (--timeout 3)" in run.sentence
    assert run.document()["trials"]["unfinished"] == 1


def test_a_write_that_does_not_release_is_bounded_too(drain: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment goes on with the launch; it ends in a verdict of its own, never in silence."""
    monkeypatch.setattr("dsv4_repro.repro.run.RELEASE_COUNT", 1)
    run = drain()
    assert run.status == 3
    experiment = run.document()["unwedge"]
    assert (experiment["attempted"], experiment["retired"]) == (True, False)
    assert "deadlock" in experiment["why_not"]


def rows(text: str) -> list[tuple[str, str, str]]:
    found = []
    for line in text.strip().splitlines():
        guard, _, rest = line.strip().partition(" ") if line.strip().startswith("@") else ("", "", line.strip())
        opcode, _, operands = rest.partition(" ")
        found.append((opcode, operands.replace(" ", ""), guard))
    return found


@pytest.fixture
def with_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The kernel's instructions replaced by a few of our own; its name, parameters and cubin stay."""

    def arrange(text: str) -> None:
        def from_image(image: Any) -> Program:
            return Program.from_rows(
                image.function, image.sm, rows(text), {}, params_base=image.params_base, params_size=image.params_size, registers=32
            )  # fmt: skip

        monkeypatch.setattr("dsv4_repro.repro.cpu_ground.Program.from_image", from_image)

    return arrange


def test_a_livelock_is_called_one_and_no_barrier(drain: Callable[..., Done], with_code: Callable[[str], None]) -> None:
    """Two instructions for ever: the state recurs, nobody polls, nobody waits."""
    with_code("MOV R0, 0x1\n MOV R1, R0\n BRA 0x10\n EXIT")
    run = drain()
    assert run.status == 3
    assert run.verdict == ("gpu-kernel-stuck", None)
    assert "livelock, proven: the complete state of the machine recurs" in run.sentence
    assert "that none other ends it is not shown" in run.sentence
    assert run.document()["verdict"]["signature"] is None


def test_an_unknown_instruction_is_named_with_its_place(drain: Callable[..., Done], with_code: Callable[[str], None]) -> None:
    with_code("MOV R0, 0x1\n FROBNICATE R1, R0\n EXIT")
    run = drain()
    assert run.status == 5
    assert run.verdict == ("unknown", None)
    for part in ("FROBNICATE", "+0x10", "persistent_topk"):
        assert part in run.sentence


def test_a_return_into_nowhere_is_a_fault(drain: Callable[..., Done], with_code: Callable[[str], None]) -> None:
    with_code("MOV R2, 0x5550\n MOV R3, RZ\n RET.REL.NODEC R2, 0x0\n EXIT")
    run = drain()
    assert run.status == 4
    assert run.verdict == ("gpu-fault", None)
    assert "the interpreter reported a fault" in run.sentence


# ---- the memory checker ---------------------------------------------------------------------------------------------------------


def prepared(spec: str = "builtin", **options: Any) -> PreparedRun:
    device = device_for_sm(120)
    plan = DrainPlan(requests=4, min_live=3, output=(4, 4), steps=8)
    return prepare_drain(plan, "cpu", choose_kernel(spec, 120, 512, 4, interpreted=True), device, options=options)


@pytest.fixture
def ground() -> Iterator[CpuGround]:
    made = CpuGround()
    yield made
    made.close()


def _ignore(_kind: str, **_fields: Any) -> None:
    """A timeline that nobody reads."""


def test_a_row_read_past_its_end_is_a_fault_with_thread_instruction_and_address(ground: CpuGround) -> None:
    run = prepared(checks=True)
    ground.open(run.request, _ignore)
    step = next(item for item in run.request.steps if item.graph_rows == 8)
    outcome = ground.run_step(replace(step, lengths=(*step.lengths[:-1], 20000)))
    assert outcome.state == "fault"
    assert outcome.detail["cause"] == "illegal-access"
    seen = outcome.detail["fault"]
    assert (seen["kind"], seen["space"], seen["block"]) == ("out-of-bounds", "global", 14)
    assert seen["instruction"].startswith("LDG")
    for part in (f"thread {seen['thread']} of CTA 14", seen["address"], f"+{seen['pc_offset']:#x}"):
        assert part in outcome.reasons[0]


#: A load from address 0x50.
OUTSIDE = "MOV R2, 0x50\n MOV R3, RZ\n ULDC.64 UR4, c[0x0][0x118]\n LDG.E R5, desc[UR4][R2.64]\n EXIT"


@pytest.mark.parametrize(
    ("code", "status", "verdict", "kind"),
    [
        (OUTSIDE, 4, ("gpu-fault", "illegal-access"), "out-of-bounds"),
        ("MOV R2, 0x2\n STS [R2], RZ\n EXIT", 4, ("gpu-fault", "misaligned"), "misaligned"),
        ("LDS R5, [RZ+0x20]\n EXIT", 5, ("unknown", None), "uninitialised"),
    ],
)  # fmt: skip
def test_faults_through_the_command_line(
    drain: Callable[..., Done], with_code: Callable[[str], None], code: str, status: int, verdict: tuple[str, str | None], kind: str
) -> None:
    """An access outside is a fault; a read of what nobody wrote is one of the checker's findings, not of a GPU."""
    with_code(code)
    run = drain("--checks", "--arch", "sm_80")
    assert run.status == status
    assert run.verdict == verdict
    assert f"{kind} " in run.sentence
    assert "by thread 0 of CTA 0" in run.sentence
    fault = run.steps()[-1]["detail"]["fault"]
    assert (fault["kind"], fault["thread"], fault["block"]) == (kind, 0, 0)


def test_notes_of_the_checker_are_in_the_timeline(drain: Callable[..., Done], with_code: Callable[[str], None]) -> None:
    with_code("LDL R5, [RZ]\n EXIT")
    run = drain("--checks")
    assert run.verdict == ("wrong-result", None)
    assert "uninitialised local load" in run.steps()[-1]["detail"]["memory_checker"][0]


# ---- without NVRTC --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_arguments: Any, **_options: Any) -> Any:
        raise ToolMissingError("NVRTC is not installed", help_text="pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(build, "builtin_image", missing)


@pytest.mark.usefixtures("no_compiler")
def test_a_first_run_needs_no_compiler(drain: Callable[..., Done], capsys: pytest.CaptureFixture[str]) -> None:
    run = drain()
    assert run.status == 3
    assert run.verdict == ("gpu-spin-barrier", "peer-left")
    assert "the decoded code for sm_120 that ships with this package (NVRTC is not installed)" in run.words
    (dump,) = run.folder.glob("evidence/hang-1/*.nvcudmp")
    with open_core(dump) as core:
        assert core.state.grids[0].code is None
    found = diagnose_dump(dump)
    assert found.verdict.class_ in ("gpu-kernel-stuck", "unknown")
    assert any("machine code" in item.what + item.why for item in found.unread)
    assert drain("--kernel", "builtin:guard").status == 0
    assert drain("--kernel", "builtin:init-race").status == 5


# ---- bad input ------------------------------------------------------------------------------------------------------------------


def _text_section(cubin: bytes) -> tuple[int, int]:
    found = [part for part in read_elf(cubin).sections if part.name.startswith(".text.")]
    return found[0].offset, found[0].size


def _damaged(how: str) -> bytes:
    good = builtin_image("unguarded", 120, 512, 4).cubin
    start, size = _text_section(good)
    junk = b"\xff" * 16
    made: dict[str, Callable[[], bytes]] = {
        "another architecture": lambda: builtin_image("unguarded", 90, 512, 4).cubin,
        "truncated": lambda: good[: len(good) // 2],
        "header only": lambda: good[:64],
        "empty": lambda: b"",
        "text": lambda: b"not machine code\n" * 100,
        "stripped": lambda: good[:0x28] + bytes(8) + good[0x30:0x3C] + bytes(4) + good[0x40:],
        "an unknown instruction": lambda: good[: start + 0x200] + junk + good[start + 0x210 :],
        "all unknown": lambda: good[:start] + b"\xff" * size + good[start + size :],
        "zeros": lambda: good[:start] + bytes(size) + good[start + size :],
    }
    return made[how]()


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("another architecture", 2, "has no machine code for sm_120; it has sm_90"),
        ("truncated", 5, "do not fit"),
        ("header only", 5, "kernel.cubin"),
        ("empty", 5, "neither a wheel"),
        ("text", 5, "neither a wheel"),
        ("stripped", None, "kernel.cubin"),
        ("an unknown instruction", 5, "address 0x00000200"),
        ("all unknown", 5, "nvdisasm cannot read it"),
        ("zeros", None, ""),
    ],
)
def test_damaged_cubins(drain: Callable[..., Done], tmp_path: Path, how: str, status: int | None, words: str) -> None:
    (tmp_path / "kernel.cubin").write_bytes(_damaged(how))
    began = time.monotonic()
    run = drain("--kernel", "kernel.cubin", "--timeout", "20")
    assert time.monotonic() - began < 40
    assert run.status in ((2, 4, 5) if status is None else (status,))
    assert words in run.err + run.words
    assert "Traceback" not in run.err


def test_a_cubin_file_runs_like_the_kernel_it_was_built_from(drain: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "kernel.cubin").write_bytes(builtin_image("unguarded", 120, 512, 4).cubin)
    run = drain("--kernel", "kernel.cubin")
    assert run.status == 3
    assert run.verdict == ("gpu-spin-barrier", "peer-left")
    assert "the danger window is step" in run.words


def test_a_grid_that_does_not_fit_is_refused_as_the_launcher_does(drain: Callable[..., Done]) -> None:
    run = drain("--device", "L4", "--max-model-len", "8388608", "--compress", "1")
    assert run.status == 4
    assert run.verdict[0] == "launch-refused"
    assert "total_ctas" in run.sentence


def test_a_plan_that_does_not_fit_into_memory_is_refused(ground: CpuGround) -> None:
    run = prepared()
    wide = {rows: replace(launch, stride=1 << 28) for rows, launch in run.request.launches.items()}
    with pytest.raises(BudgetError, match="GiB on the CPU ground"):
        ground.open(replace(run.request, launches=wide), _ignore)


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_the_middle_leaves_a_directory_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["run", "drain", "--on", "cpu", "--kernel", "builtin:bounded-spin,spin_limit=2000000000", *SMALL, "--out", str(folder)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "dsv4_repro.repro", *words]
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        deadline = time.monotonic() + 60
        timeline = folder / "timeline.jsonl"
        while time.monotonic() < deadline and not (timeline.is_file() and '"step"' in timeline.read_text()):
            time.sleep(0.1)
        time.sleep(1.0)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 130, out
    assert "Traceback" not in out
    view = open_run(folder)
    assert view.run.state == "interrupted"
    assert any(line["kind"] == "step" for line in lines_of(folder))


# ---- releases (downloaded in ranges, kept in the user's cache)
# ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.release_wheel
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("version", "hangs"), [("0.20.2", True), ("0.27.1", True), ("0.28.0", False), ("0.33.0", False)])
def test_releases(drain: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, version: str, hangs: bool, arch: str) -> None:
    monkeypatch.delenv("DSV4_REPRO_CACHE")
    run = drain("--kernel", f"vllm=={version}", "--arch", arch)
    if run.status == 5 and not (run.folder / "run.json").exists():
        pytest.skip(f"vLLM {version} cannot be had here: {run.err[-300:]}")
    assert run.status == (3 if hangs else 0)
    assert run.verdict == (("gpu-spin-barrier", "peer-left") if hangs else ("not-hung", None))
    if hangs:
        assert run.document()["unwedge"]["retired"] is True


@pytest.mark.release_wheel
@pytest.mark.parametrize("version", ["0.27.1", "0.33.0"])
def test_releases_pass_the_memory_checker(drain: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.delenv("DSV4_REPRO_CACHE")
    run = drain("--kernel", f"vllm=={version}", "--checks")
    if run.status == 5 and not (run.folder / "run.json").exists():
        pytest.skip(f"vLLM {version} cannot be had here: {run.err[-300:]}")
    assert run.status in (0, 3)
