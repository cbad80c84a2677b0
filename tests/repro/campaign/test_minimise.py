"""Shrinking: 1-minimal, only by the same hang; and the reproducer, run against the stand-in for libcuda."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.clock import Deadline, FakeClock
from dsv4_repro.errors import BudgetError, InconclusiveError
from dsv4_repro.kernels.plan import device_for_sm
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign.cells import Cell
from dsv4_repro.repro.campaign.launches import LaunchBench, LaunchCase, Seen
from dsv4_repro.repro.campaign.minimise import Minimised, minimise_case
from dsv4_repro.repro.campaign.reproducer import reproducer_text, write_reproducer
from dsv4_repro.repro.campaign.shrink import Account, ddmin, smallest
from dsv4_repro.repro.schemas import schema_of


@settings(deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1, max_size=4), st.integers(41, 60))
def test_ddmin_finds_what_is_needed_and_nothing_else(needed: set[int], size: int) -> None:
    assert ddmin(list(range(size)), lambda items: needed <= set(items)) == sorted(needed)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_ddmin_is_1_minimal_for_any_property_that_the_whole_has(size: int, dice: Any) -> None:
    failing = {tuple(sorted(dice.sample(range(size), dice.randint(1, size)))) for _ in range(3)} | {tuple(range(size))}
    found = ddmin(list(range(size)), lambda items: any(set(one) <= set(items) for one in failing))
    assert any(set(one) <= set(found) for one in failing)
    for item in found:
        rest = [other for other in found if other != item]
        assert not rest or not any(set(one) <= set(rest) for one in failing)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5000))
def test_smallest_number(least: int, more: int) -> None:
    assert smallest(least + more, lambda number: number >= least) == least


def test_smallest_looks_below_a_gap() -> None:
    assert smallest(1000, lambda number: number >= 500 or number == 497) == 497


class FakeBench:
    """Hangs with ``identity`` where ``rule`` says so."""

    def __init__(self, rule: Any, identity: str = "a" * 12) -> None:
        self.rule, self.identity, self.trials = rule, identity, 0

    def run(self, case: LaunchCase, repeats: int, *, wanted: str | None = None, seed: int = 0) -> list[Seen]:
        self.trials += repeats
        answer = self.rule(case)
        if answer is True:
            return [Seen("hang", self.identity)] * repeats
        return [Seen("hang", answer)] if isinstance(answer, str) else [Seen("done")]


def forever() -> Deadline:
    return Deadline(float("inf"), FakeClock())


START = LaunchCase((300, 301, 280, 281, 222, 223, -1, 0), 16384)


def test_only_the_same_hang_counts() -> None:
    """Below width 9000 another hang shows: the search must not slide over to it."""
    bench = FakeBench(lambda case: min(case.lengths) < 0 and (True if case.width >= 9000 else "b" * 12))
    account = Account()
    case = minimise_case(bench, START, "a" * 12, 5, account, deadline=forever())  # type: ignore[arg-type]
    assert (case.lengths, case.width) == ((-1,), 9000)
    assert account.candidates > account.kept > 0


def test_one_repetition_that_does_not_hang_drops_a_candidate() -> None:
    class Flaky(FakeBench):
        def run(self, case: LaunchCase, repeats: int, **more: Any) -> list[Seen]:
            full = super().run(case, repeats, **more)
            return [*full[:-1], Seen("done")] if len(case.lengths) < 3 and full[0].kind == "hang" else full

    bench: Any = Flaky(lambda case: -1 in case.lengths)
    case = minimise_case(bench, START, "a" * 12, 5, Account(), deadline=forever())
    assert len(case.lengths) == 3


def test_what_does_not_hang_alone_is_inconclusive_and_time_is_a_budget() -> None:
    never: Any = FakeBench(lambda _case: False)
    always: Any = FakeBench(lambda _case: True)
    with pytest.raises(InconclusiveError, match="does not hang 5 of 5"):
        minimise_case(never, START, "a" * 12, 5, Account(), deadline=forever())
    over = Deadline(0, FakeClock())
    with pytest.raises(BudgetError, match="--timeout"):
        minimise_case(always, START, "a" * 12, 5, Account(), deadline=over)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["run", "drain", "--on", "cpu", "--layers", "1", "--out", str(folder)]) == 3
    return folder


def test_the_published_case_shrinks_to_one_row_of_minus_one_and_two_ctas(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["minimise", str(run_folder), "--json", "--confirm", "3"]) == 3
    captured = capsys.readouterr()
    told = [line for line in captured.err.splitlines() if line.startswith(("plan: ", "launch: ", "HANG ", "smallest plan: "))]
    assert [line.partition(" ")[0] for line in told][-2:] == ["HANG", "smallest"], "how it was shrunk stands before the verdict"
    assert len(told) > 2
    document = json.loads(captured.out)
    jsonschema.validate(document, schema_of("minimise"))
    assert document["case"]["lengths"] == [-1]
    assert document["launch"]["ctas_per_group"] == document["launch"]["grid"] == 2
    assert document["identity"] == json.loads((run_folder / "diagnosis.json").read_text())["verdict"]["identity"]
    # Nothing narrower makes two CTAs: neither by the launcher's arithmetic nor when it is run.
    bench = LaunchBench("builtin", device_for_sm(120))
    width = document["case"]["width"]
    for narrower in range(width - 8, width):
        _chosen, plan = bench.launch(LaunchCase((-1,), narrower))
        assert plan.ctas_per_group == 1
    assert [seen.kind for seen in bench.run(LaunchCase((-1,), width - 1), 1)] != ["hang"]
    assert document["plan"]["steps"] == 1
    assert (run_folder / "minimised" / "reproducer.py").is_file()
    assert document["confidence"]["hazard_at_least"] == pytest.approx(0.01 ** (1 / 3))


def test_a_clean_run_cannot_be_minimised(tmp_path: Path) -> None:
    assert main(["run", "drain", "--on", "cpu", "--layers", "1", "--kernel", "builtin:guard", "--out", str(tmp_path / "r")]) == 0
    assert main(["minimise", str(tmp_path / "r")]) == 5
    assert main(["minimise", str(tmp_path / "nothing")]) == 5


# -- the reproducer ------------------------------------------------------------------------------------------------------------


def minimised(kernel: str = "builtin", lengths: tuple[int, ...] = (-1,)) -> Minimised:
    cell = Cell(name="x", kernel=kernel, arch=120)
    launch = {
        "grid": 2, "groups": 1, "ctas_per_group": 2, "chunk_size": 4240, "dynamic_smem": 35968, "vec": 1,
        "device": "it's \"a\" GPU", "sm": 120,
    }  # fmt: skip
    return Minimised("dd4289b0e668", 5, cell, 0, LaunchCase(lengths, 8473), launch)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of libcuda")
    folder = tmp_path_factory.mktemp("fake-cuda")
    source = Path(__file__).parents[2] / "kernels" / "fake_cuda.c"
    out = str(folder / "libcuda.so.1")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", out, str(source), "-ldl", "-lpthread"], check=True)
    return folder


def run_file(path: Path, library: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"LD_LIBRARY_PATH": str(library)} if library is not None else {})}
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.parametrize(
    ("defect", "lengths", "status", "said"),
    [
        ("plain", (-1,), 3, "arrival counters [1] of 2"),
        ("guard", (-1,), 0, "no hang"),
        ("plain", (900,), 0, "no hang"),
        ("fault", (-1,), 5, ""),
    ],
)
def test_the_reproducer_exits_3_when_it_hangs_and_releases_itself(
    tmp_path: Path, card: Path, defect: str, lengths: tuple[int, ...], status: int, said: str
) -> None:
    """Everything after the compilation, against the stand-in (NVRTC itself cannot be loaded beside it)."""
    text = reproducer_text(minimised(lengths=lengths)).replace(
        "HANG_AFTER_S, RELEASE_WITHIN_S = 5.0, 5.0", "HANG_AFTER_S, RELEASE_WITHIN_S = 0.5, 2.0"
    )
    image = f'def compiled(sm):\n    return b"\\x7fELF{defect}\\0", b"topk"\n\n\ndef main():'
    path = tmp_path / "reproducer.py"
    path.write_text(text.replace("def main():", image, 1))
    done = run_file(path, card)
    assert done.returncode == status, done.stderr
    assert said in done.stdout
    assert ("released by writing the counter" in done.stdout) == (status == 3)


def test_the_reproducer_compiles_the_kernel_that_it_carries(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    path = tmp_path / "reproducer.py"
    text = reproducer_text(minimised()).replace(
        'if __name__ == "__main__":', "cubin, name = compiled(90)\nprint(cubin[:4], name)\nif False:"
    )
    path.write_text(text)
    done = run_file(path, None)
    assert done.returncode == 0, done.stderr
    assert "ELF" in done.stdout
    assert "persistent_topk_kernel" in done.stdout


def test_without_a_driver_the_reproducer_says_what_it_needs(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there is a driver here")
    done = run_file(write_reproducer(tmp_path / "reproducer.py", minimised()), None)
    assert done.returncode == 5
    assert "driver" in done.stderr


@pytest.mark.parametrize("kernel", ["builtin", "builtin:bounded-spin,spin_limit=64", "vllm==0.27.1", "/x/'''\"/_C.so"])
def test_every_reproducer_parses_whatever_the_run_said(tmp_path: Path, kernel: str) -> None:
    done = minimised(kernel)
    path = write_reproducer(tmp_path / "reproducer.py", done)
    text = path.read_text()
    compile(text, "reproducer.py", "exec")
    assert "import dsv4_repro" not in text
    assert ("torch.ops._C.persistent_topk" in text) == (not kernel.startswith("builtin"))
    assert "@" not in "".join(
        line for line in text.splitlines() if line.startswith(("VERSION", "LENGTHS", "CHUNK", "GROUPS", "DEFINES"))
    )
