"""The persistent top-k interpreted: right answers, the hang and its relatives, the unwedge write, random schedules, the checker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from dsv4_repro.errors import DownloadError, ToolMissingError, UsageError
from dsv4_repro.kernels.abi import RELEASE_COUNT
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.shipped import SHIPPED_ARCHITECTURES, shipped_image
from dsv4_repro.kernels.sass.topk import TopKRun, collect, run_case, run_topk
from dsv4_repro.kernels.topk_cases import TopKCase, all_cases, sample_cases

#: The shape of vLLM #51593: 8 rows of 16384, two CTAs a group, no row longer than max_seq_len 16384.
DRAINED = (16000, 16001, 12000, 12001, 9000, 9001, 0, 0)


@lru_cache(maxsize=64)
def builtin(build: str, sm: int, k: int = 512, vec: int = 4) -> Program:
    image = shipped_image(build, sm, k, vec)
    assert image is not None
    return Program.from_image(image)


@lru_cache(maxsize=1)
def logits() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((8, 16384)).astype(np.float32)


def drained(program: Program, lengths: tuple[int, ...], **options: object) -> TopKRun:
    return run_topk(
        program, logits(), np.array(lengths, np.int32), k=512, chunk_size=8192, ctas_per_group=2, groups=8, max_seq_len=16384,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def right(run: TopKRun, lengths: tuple[int, ...]) -> None:
    assert run.result.kind == "completed", run.result
    wrong = [verdict.text for verdict in run.verdicts(logits(), np.array(lengths, np.int32)) if not verdict.ok]
    assert not wrong
    assert run.machine.memory.intact()


@pytest.mark.parametrize("sm", SHIPPED_ARCHITECTURES)
def test_healthy_batch_is_right(sm: int) -> None:
    for build in ("unguarded", "guard"):
        right(drained(builtin(build, sm), DRAINED), DRAINED)


@pytest.mark.parametrize("sm", SHIPPED_ARCHITECTURES)
def test_one_negative_length_wedges_the_unguarded_build_only(sm: int) -> None:
    lengths = (*DRAINED[:6], -1, 0)
    run = drained(builtin("unguarded", sm), lengths)
    assert (run.result.kind, run.result.spin) == ("deadlock", True)
    assert run.counters == (0, 0, 0, 0, 0, 0, 1, 0)
    assert {s.block for s in run.result.stuck} == {12}
    assert run.result.exited == tuple(block for block in range(16) if block != 12)
    assert run.result.never_started == ()
    polling = [s for s in run.result.stuck if s.state == "polling"]
    assert [s.threads for s in polling] == [(0,)]
    assert sum(len(s.threads) for s in run.result.stuck) == 1024
    assert all(s.state in ("polling", "waiting") for s in run.result.stuck)
    wrong = [v.row for v in run.verdicts(logits(), np.array(lengths, np.int32)) if not v.ok]
    assert wrong == [6]
    right(drained(builtin("guard", sm), lengths), lengths)


def test_the_loaded_counter_and_the_target_are_in_registers() -> None:
    """What a debugger reads at the hang: a register that holds the counter, 1, one that holds the target, 2, and the row
    state's address.
    """
    run = drained(builtin("unguarded", 120), (*DRAINED[:6], -1, 0))
    snapshot = run.machine.snapshot(12)
    values = snapshot.registers[0].tolist()
    assert 1 in values
    assert 2 in values
    pairs = {low | high << 32 for low, high in pairwise(values)}
    state = run.params.row_states + 6 * 3088
    assert pairs & {state, state + 3080}
    assert snapshot.pc[0] != snapshot.pc[1]


def test_a_write_into_the_counter_releases_it() -> None:
    run = drained(builtin("unguarded", 120), (*DRAINED[:6], -1, 0))
    run.machine.poke(run.params.row_states + 6 * 3088 + 3080, RELEASE_COUNT)
    after = collect(run.machine, run.params, 8, run.machine.resume())
    assert after.result.completed
    assert after.counters[6] == RELEASE_COUNT + 5
    wrong = [v.row for v in after.verdicts(logits(), np.array((*DRAINED[:6], -1, 0), np.int32)) if not v.ok]
    assert set(wrong) <= {6}


@pytest.mark.parametrize("length", [-1, -2, -32768, -(2**31), 2**31 - 1, 32769, 40000])
def test_every_length_that_reads_as_long_wedges(length: int) -> None:
    assert drained(builtin("unguarded", 120), (*DRAINED[:6], length, 0)).result.kind == "deadlock"
    assert drained(builtin("guard", 120), (*DRAINED[:6], length, 0)).result.kind == "completed"


def test_not_all_members_resident_is_a_deadlock_that_names_them() -> None:
    case = TopKCase("x", 512, 4, (40000,), 40000, 40000, 4, 1, 10000)
    run, _ = run_case(builtin("guard", 120), case, sms=3)
    assert (run.result.kind, run.result.never_started) == ("deadlock", (3,))
    assert {s.block for s in run.result.stuck} == {0, 1, 2}
    assert run.counters == (3,)
    run, verdicts = run_case(builtin("guard", 120), case, sms=2, slots_per_sm=2)
    assert run.result.completed
    assert all(v.ok for v in verdicts)
    assert run.counters == (24,)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sm", [90, 120])
def test_random_schedules_change_nothing(sm: int, seed: int) -> None:
    right(drained(builtin("guard", sm), DRAINED, schedule="random", seed=seed), DRAINED)
    run = drained(builtin("unguarded", sm), (*DRAINED[:6], -1, 0), schedule="random", seed=seed)
    assert (run.result.kind, {s.block for s in run.result.stuck}) == ("deadlock", {12})
    case = TopKCase("x", 512, 4, (33001, 5, 9000, 34000), 34000, 34000, 3, 1, 11336)
    run, verdicts = run_case(builtin("guard", sm), case, schedule="random", seed=seed)
    assert run.result.completed
    assert all(v.ok for v in verdicts)
    assert run.counters == case.counters()


@pytest.mark.parametrize("sm", [75, 90, 100, 120])
def test_the_checker_finds_nothing_in_a_healthy_run(sm: int) -> None:
    right(
        drained(builtin("guard", sm), (25, 0, 512, 513, 8192, 8193, 16384, 1), checks=True), (25, 0, 512, 513, 8192, 8193, 16384, 1)
    )
    run, verdicts = run_case(builtin("guard", sm), TopKCase("x", 512, 4, (40000,), 40000, 40000, 4, 1, 10000), checks=True)
    assert run.result.completed
    assert all(v.ok for v in verdicts)


def test_the_checker_sees_a_row_read_past_its_end() -> None:
    """Unguarded, 20000 in rows of 16384: the last row's reads leave the logits."""
    run = drained(builtin("unguarded", 120), (*DRAINED[:7], 20000), checks=True)
    assert run.result.fault is not None
    assert (run.result.fault.kind, run.result.fault.space) == ("out-of-bounds", "global")
    assert "past the end of input" in run.result.fault.message
    assert run.result.fault.block == 14


def test_a_stale_counter_lets_the_lone_leader_through() -> None:
    """Row states that the host did not zero: six old arrivals are enough for a wrong end instead of a hang."""
    run = run_topk(
        builtin("unguarded", 120), logits(), np.array((*DRAINED[:6], -1, 0), np.int32), k=512, chunk_size=8192,
        ctas_per_group=2, groups=8, max_seq_len=16384, row_state_word=64,
    )  # fmt: skip
    assert run.result.completed


@pytest.mark.parametrize("case", sample_cases(10, seed=3), ids=lambda case: case.name)
def test_sample_of_the_sweep(case: TopKCase) -> None:
    """A seeded part of the sweep on two architectures; all of it by ``python benchmarks/cpu_sweep.py``."""
    for sm in (90, 120):
        run, verdicts = run_case(builtin("guard", sm, case.k, case.vec), case)
        assert run.result.completed, run.result
        assert [v.text for v in verdicts if not v.ok] == []
        assert run.counters == case.counters()


@pytest.mark.slow
@pytest.mark.parametrize("sm", SHIPPED_ARCHITECTURES)
def test_whole_sweep(sm: int) -> None:
    for case in all_cases():
        run, verdicts = run_case(builtin("guard", sm, case.k, case.vec), case)
        assert run.result.completed, (case.name, run.result)
        assert [v.text for v in verdicts if not v.ok] == [], case.name
        assert run.counters == case.counters(), case.name


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(UsageError):
        run_topk(
            builtin("guard", 120),
            logits(),
            np.zeros(7, np.int32),
            k=512,
            chunk_size=8192,
            ctas_per_group=2,
            groups=8,
            max_seq_len=9,
        )


# ---- shipped releases (downloaded in ranges, kept in the user's cache)
# -----------------------------------------------------------------


@pytest.fixture(scope="module")
def release() -> Callable[..., Program]:
    from dsv4_repro.kernels.select import select

    @lru_cache(maxsize=64)
    def get(version: str, sm: int, k: int = 512, vec: int = 4) -> Program:
        try:
            return Program.from_image(select(f"vllm=={version}", sm=sm, top_k=k, vec=vec).image)
        except (DownloadError, ToolMissingError) as error:
            pytest.skip(f"vLLM {version} cannot be had here: {error}")

    return get


@pytest.mark.release_wheel
@pytest.mark.parametrize("sm", SHIPPED_ARCHITECTURES)
@pytest.mark.parametrize(("version", "hangs"), [("0.27.1", True), ("0.33.0", False)])
def test_releases_hang_or_not(release: Callable[..., Program], version: str, hangs: bool, sm: int) -> None:
    program = release(version, sm)
    assert not program.function.unknown
    right(drained(program, DRAINED), DRAINED)
    lengths = (*DRAINED[:6], -1, 0)
    run = drained(program, lengths)
    if not hangs:
        right(run, lengths)
        return
    assert (run.result.kind, {s.block for s in run.result.stuck}) == ("deadlock", {12})
    assert run.counters == (0, 0, 0, 0, 0, 0, 1, 0)


@pytest.mark.release_wheel
def test_the_hang_of_0_27_1_is_the_one_seen_on_an_h200(release: Callable[..., Program]) -> None:
    """Measured there with cuda-gdb: thread 0 in the poll loop, R4 = 1, R9 = 2, R7:R6 the row state, the other warps at the CTA
    barrier.
    """
    run = drained(release("0.27.1", 90), (*DRAINED[:6], -1, 0))
    snapshot = run.machine.snapshot(12)
    assert 0x1C90 <= snapshot.pc[0] <= 0x1D10
    assert set(snapshot.pc[1:32].tolist()) == {0x1D30}
    assert set(snapshot.pc[32:].tolist()) == {0x1D40}
    registers = snapshot.registers[0].tolist()
    assert (registers[4], registers[9]) == (1, 2)
    assert registers[6] | registers[7] << 32 == run.params.row_states + 6 * 3088
    assert [(s.pc, len(s.threads), s.state) for s in run.result.stuck] == [
        (0x1C90, 1, "polling"), (0x1D30, 31, "waiting"), (0x1D40, 992, "waiting"),
    ]  # fmt: skip


def named(name: str) -> TopKCase:
    return next(case for case in all_cases() if case.name == name)


@pytest.mark.release_wheel
@pytest.mark.parametrize("sm", [90, 120])
@pytest.mark.parametrize(
    ("name", "wrong_rows"),
    [
        ("k512v4 long-short-long", {2, 4, 6}),
        ("dense k512 one CTA", None),
        ("infinities k512 one CTA", {0}),
        ("k512v4 3 CTAs", set()),
    ],
)
def test_known_defects_of_0_27_1_show(release: Callable[..., Program], sm: int, name: str, wrong_rows: set[int] | None) -> None:
    """#49139's histogram ring; candidate buffers that overflow on dense values; a row of 513 with -inf. Long rows alone are
    right.
    """
    run, verdicts = run_case(release("0.27.1", sm), named(name))
    wrong = {v.row for v in verdicts if not v.ok}
    assert run.result.completed
    assert wrong == wrong_rows if wrong_rows is not None else wrong
    run, verdicts = run_case(release("0.33.0", sm), named(name))
    assert run.result.completed
    assert [v.text for v in verdicts if not v.ok] == []


@pytest.mark.release_wheel
@pytest.mark.parametrize(("version", "races"), [("0.27.1", True), ("0.28.0", True), ("0.33.0", False)])
def test_warps_that_drift_lose_the_last_element(release: Callable[..., Program], version: str, races: bool) -> None:
    """Up to 0.28.0 no CTA barrier stands between a long row's tie pass and the next row's load into the same shared memory.

    In a schedule where a warp runs ahead, a tie that another warp has not read yet is overwritten and the row's k-th element is
    missing. Seen in the interpreter only: a chip's warps hardly drift that far.
    """
    case = TopKCase("drift", 512, 2, (33000,) * 6, 40002, 40002, 4, 1, 10002, ("normal",), 3)
    wide = dataclasses.replace(case, name="k512v2 long-short-long")
    run, verdicts = run_case(release(version, 90, 512, 2), wide)
    assert run.result.completed
    wrong = [v for v in verdicts if not v.ok]
    assert bool(wrong) == races
    assert all((v.out_of_range, v.misplaced, v.duplicates) == (1, 0, 0) for v in wrong)
