"""The builtin kernel: right on every case, and each defect with its own outcome, on a CPU emulation of the CUDA source.

The emulation (``emulation.cpp``) needs a C++ compiler; without one these tests are skipped. It runs the source, not the machine
code: what NVRTC makes of it is checked below by its disassembly, and run by the interpreter's own tests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, RADIX_THRESHOLD, ROW_STATE_SIZE
from dsv4_repro.kernels.build import VARIANTS, builtin_image, source_path
from dsv4_repro.kernels.disasm import Disassembly, disassemble
from dsv4_repro.kernels.reference import check_rows
from dsv4_repro.kernels.topk_cases import DATA_KINDS, TopKCase, all_cases, make_row, sample_cases

COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
ENDED, HUNG = 0, 1


@dataclass(frozen=True)
class Run:
    """One emulated launch: how it ended, each group's counter, the rows that are wrong, the row states, CTAs that never started."""

    end: int
    counters: tuple[int, ...]
    wrong: tuple[str, ...]
    states: NDArray[np.uint32]
    never_started: int


Launch = Callable[..., Run]


def without_ptx(source: str) -> str:
    """The kernel's source with its four pieces that a C++ compiler does not know replaced; each must be there exactly once."""
    for pattern, replacement in (
        (r"extern __shared__ __align__\(16\) unsigned char dynamic_shared\[\];", ""),
        (r'asm volatile\("ld\.acquire.*?"memory"\);', "give_way(); value = state->arrival_counter;"),
        (r'asm volatile\("red\.relaxed.*?"memory"\);', "state->arrival_counter += 1;"),
        (r'asm volatile\("ld\.relaxed.*?"memory"\);', "value = *address;"),
    ):
        source, count = re.subn(pattern, replacement, source, flags=re.DOTALL)
        assert count == 1, pattern
    assert "asm" not in source
    return source


@pytest.fixture(scope="session")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launch]:
    """``emulate("guard", widen_us=50)`` → a function that runs a case."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: the CUDA source was not run")
    folder = tmp_path_factory.mktemp("emulation")
    (folder / "kernel.inc").write_text(without_ptx(source_path("persistent_topk.cu").read_text()))

    @lru_cache(maxsize=32)
    def compiled(variant: str, extra: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        target = folder / f"{variant}{len(list(folder.iterdir()))}.so"
        defines = [f"-DDSV4_{name}" for name in VARIANTS[variant].defines] + [
            f"-DDSV4_{name.upper()}={value}" for name, value in extra
        ]
        if variant == "guard":
            defines.append("-DALL_INSTANCES")  # the others run with k 512 and vector width 4 only: compiling is what takes time
        command = [str(COMPILER), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", f"-I{folder}", *defines]
        subprocess.run([*command, "-o", str(target), str(Path(__file__).with_name("emulation.cpp"))], check=True)
        return ctypes.CDLL(str(target))

    def choose(variant: str, **extra: int) -> Launch:
        library = compiled(variant, tuple(sorted(extra.items())))

        def launch(case: TopKCase, *, seed: int = 0, slots: int | None = None, sweeps: int = 4000, start: int = 0) -> Run:
            logits, lengths = case.logits(), np.array(case.lengths, dtype=np.int32)
            output = np.full((len(lengths), case.k), -7, dtype=np.int32)
            states = np.zeros((case.groups, ROW_STATE_SIZE // 4), dtype=np.uint32)
            states[:, ARRIVAL_COUNTER_OFFSET // 4] = start
            params = case.params(
                input=logits.ctypes.data, output=output.ctypes.data, lengths=lengths.ctypes.data, row_states=states.ctypes.data
            )
            left = ctypes.c_uint()
            end = library.launch(
                case.k, case.vec, case.grid, case.dynamic_smem, slots or case.grid, seed,
                ctypes.create_string_buffer(params.pack(), 56), ctypes.c_long(sweeps), ctypes.byref(left),
            )  # fmt: skip
            assert end in (ENDED, HUNG), "wrote behind its shared memory" if end == 2 else end
            wrong = tuple(verdict.text for verdict in check_rows(output, logits, lengths, case.k) if not verdict.ok)
            counters = tuple(int(value) for value in states[:, ARRIVAL_COUNTER_OFFSET // 4].astype(np.int32))
            return Run(end, counters, wrong, states, left.value)

        return launch

    return choose


def named(name: str, **changes: object) -> TopKCase:
    (case,) = (case for case in all_cases() if case.name == name)
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


PADDED = named("peers leave", lengths=(16000, 16001, 12000, 12001, 9000, 9001, -1, 0))
WIDE = named("peers leave", lengths=(33000, 16001, 12000, 12001, 9000, 9001, 0, 0), stride=40000, chunk_size=20000)
ONLY_GROUP_6 = (0, 0, 0, 0, 0, 0, 1, 0)


def right(run: Run, case: TopKCase) -> bool:
    return run.end == ENDED and not run.wrong and run.counters == case.counters()


# -- the answers


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_every_case_is_right_with_the_guard(first: int, emulate: Callable[..., Launch]) -> None:
    launch = emulate("guard")
    wrong = [case.name for seed, case in enumerate(list(all_cases())[first::3]) if not right(launch(case, seed=seed), case)]
    assert wrong == []


@pytest.mark.parametrize("variant", ["unguarded", "bounded-spin", "guard-one-path", "init-race", "missing-fence"])
def test_without_bad_lengths_the_defects_do_not_show(variant: str, emulate: Callable[..., Launch]) -> None:
    # The interleavings that show a race are not among these: threads of a CTA go on together, and memory is in order.
    launch = emulate(variant)
    for case in [case for case in sample_cases(60, seed=3) if (case.k, case.vec) == (512, 4)][:5]:
        clean = dataclasses.replace(case, lengths=tuple(max(length, 0) for length in case.lengths))
        run = launch(clean)
        if variant == "init-race" and clean.max_seq_len > RADIX_THRESHOLD:
            continue
        assert (run.end, run.wrong) == (ENDED, ()), clean.name
        if variant != "missing-fence":
            assert run.counters == clean.counters()


@pytest.mark.parametrize("seed", range(6))
def test_the_schedule_does_not_matter(seed: int, emulate: Callable[..., Launch]) -> None:
    for name in ("k512v4 8 CTAs", "k512v4 two groups", "two-values k512 four CTAs"):
        assert right(emulate("guard")(named(name), seed=seed), named(name))


def test_a_group_that_is_not_resident_at_once_starves(emulate: Callable[..., Launch]) -> None:
    case = named("normal k512 four CTAs", lengths=(40000,), stride=40000, chunk_size=10000)
    run = emulate("guard")(case, slots=3, sweeps=300)
    assert (run.end, run.counters, run.never_started) == (HUNG, (3,), 1)
    assert right(emulate("guard")(case, slots=4), case)


# -- the defects


@pytest.mark.parametrize("length", [-1, -2, -32768, -(2**31), 2**31 - 1, 32769, 40000])
def test_a_length_that_the_host_did_not_promise_wedges_the_unguarded_kernel_alone(
    length: int, emulate: Callable[..., Launch]
) -> None:
    case = dataclasses.replace(PADDED, lengths=(*PADDED.lengths[:6], length, 0))
    run = emulate("unguarded")(case, sweeps=300)
    assert (run.end, run.counters) == (HUNG, ONLY_GROUP_6)
    assert [text.split(" (")[0] for text in run.wrong] == ["row 6"]
    assert emulate("guard")(case).end == ENDED


@pytest.mark.parametrize("change", [{"ctas_per_group": 1, "chunk_size": 16384}, {"max_seq_len": 32769}])
def test_each_condition_of_the_wedge_is_needed(change: dict[str, int], emulate: Callable[..., Launch]) -> None:
    assert emulate("unguarded")(dataclasses.replace(PADDED, **change)).end == ENDED  # type: ignore[arg-type]


def test_six_counts_from_an_earlier_launch_let_the_lone_leader_through(emulate: Callable[..., Launch]) -> None:
    # 2, 4, … 12 are waited for, and each wait adds one: from 6 on the leader is never short.
    assert emulate("unguarded")(PADDED, start=5, sweeps=300).end == HUNG
    assert emulate("unguarded")(PADDED, start=6).end == ENDED


def test_a_bounded_spin_names_itself_and_leaves(emulate: Callable[..., Launch]) -> None:
    run = emulate("bounded-spin", spin_limit=64)(PADDED)
    assert (run.end, run.counters) == (ENDED, ONLY_GROUP_6)
    remaining_k, prefix, counter, output_counter = (int(word) for word in run.states[6, 768:])
    # Block 12 waited in phase 0 for 2 arrivals and saw 1.
    assert (remaining_k, prefix, counter, output_counter) == (12, 2, 1, 0xB0DED000)


@pytest.mark.parametrize(
    ("variant", "case", "end", "counters", "wrong"),
    [
        ("guard", PADDED, ENDED, (0,) * 8, []),
        ("guard-after-cast", PADDED, HUNG, ONLY_GROUP_6, ["row 6"]),
        ("guard-min-only", PADDED, ENDED, (0,) * 8, ["row 6"]),
        ("guard-stride-only", PADDED, ENDED, (0,) * 8, []),
        ("guard-max-seq-only", PADDED, ENDED, (0,) * 8, []),
        ("guard-one-path", PADDED, HUNG, ONLY_GROUP_6, ["row 6"]),
        # A row longer than max_seq_len where the stride has room for it: the reference wants all of it, the guard bounds it.
        ("guard", WIDE, ENDED, (0,) * 8, ["row 0"]),
        ("guard-stride-only", WIDE, HUNG, (1, *(0,) * 7), ["row 0"]),
        ("guard-max-seq-only", WIDE, ENDED, (0,) * 8, ["row 0"]),
    ],
)
def test_each_guard_with_a_mistake_fails_in_its_own_way(
    variant: str, case: TopKCase, end: int, counters: tuple[int, ...], wrong: list[str], emulate: Callable[..., Launch]
) -> None:
    run = emulate(variant)(case, sweeps=300)
    assert (run.end, run.counters, [text.split(" (")[0] for text in run.wrong]) == (end, counters, wrong)


def test_bounding_by_max_seq_len_alone_reads_past_the_row(emulate: Callable[..., Launch]) -> None:
    case = named("peers leave", lengths=(20000, *PADDED.lengths[1:6], 0, 0), max_seq_len=32768)
    assert emulate("guard")(case).wrong == ()
    assert [text.split(" (")[0] for text in emulate("guard-max-seq-only")(case).wrong] == ["row 0"]


def test_a_misaligned_ring_is_wrong_after_a_short_row_and_does_not_hang(emulate: Callable[..., Launch]) -> None:
    name = "k512v4 long-short-long"
    run = emulate("ring-misaligned")(named(name))
    assert (run.end, run.counters) == (ENDED, (96,))
    assert [text.split(" (")[0] for text in run.wrong] == ["row 2", "row 4", "row 6"]
    long_only = named(name, lengths=(40000, 39999, 33000, 38000, 36000))
    assert right(emulate("ring-misaligned")(long_only), long_only)


def test_a_state_zeroed_in_the_kernel_loses_an_arrival(emulate: Callable[..., Launch]) -> None:
    case = named("normal k512 four CTAs")
    run = emulate("init-race", widen_us=50)(case, sweeps=600)
    assert run.end == HUNG
    assert 0 < run.counters[0] < 4
    assert right(emulate("guard")(case), case)


def test_a_counter_reset_at_the_end_strands_a_peer(emulate: Callable[..., Launch]) -> None:
    run = emulate("reset-race", widen_us=50)(named("normal k512 four CTAs"), sweeps=1200)
    assert (run.end, run.counters) == (HUNG, (0,))


def test_an_early_arrival_is_wrong_or_hangs_out_of_phase(emulate: Callable[..., Launch]) -> None:
    ends = [emulate("early-arrival", widen_us=20)(named("normal k512 four CTAs"), seed=seed, sweeps=1500) for seed in range(6)]
    assert all(run.end == HUNG or run.wrong for run in ends)
    hung = [run for run in ends if run.end == HUNG]
    assert all(run.counters[0] % 4 for run in hung)


def test_early_exit_alone_is_healthy(emulate: Callable[..., Launch]) -> None:
    fewer = 0
    for name in ("infinities k512 four CTAs", "k512v4 long-short-long", "equal k512 four CTAs", "2 CTAs of uneven chunks"):
        run = emulate("early-exit")(named(name))
        assert (run.end, run.wrong) == (ENDED, ())
        fewer += run.counters != named(name).counters()
    assert fewer


# -- the machine code


def poll_loops(code: Disassembly) -> list[int]:
    """Offsets of strong loads at +0xc08 whose value is compared and branches back to the load within eight instructions."""
    found = []
    for index, line in enumerate(code.lines):
        if line.base != "LDG" or "STRONG" not in line.modifiers or "+0xc08]" not in line.operands[-1]:
            continue
        value = line.operands[0]
        after = code.lines[index + 1 : index + 9]
        compared = [item for item in after if item.base == "ISETP" and value in item.operands]
        back = [item for item in after if item.base == "BRA" and item.predicate and int(item.operands[-1], 16) <= line.offset]
        if compared and back and compared[0].operands[0] in back[0].predicate:
            found.append(line.offset)
    return found


@pytest.mark.parametrize(
    ("variant", "sm"), [*(("unguarded", sm) for sm in (75, 80, 89, 90, 100, 120, 121)), ("guard", 90), ("guard", 120)]
)
def test_the_wait_has_the_shape_of_the_shipped_one(variant: str, sm: int, cache_root: Path) -> None:
    image = builtin_image(variant, sm)
    code = disassemble(image.cubin, image.function)
    assert code.sm == sm
    assert len(poll_loops(code)) == 3  # at the start, after a round, before ties
    arrivals = [
        line for line in code.lines if line.base in ("RED", "REDG", "ATOMG") and any("+0xc08]" in part for part in line.operands)
    ]
    assert len(arrivals) == 3
    assert all("STRONG" in line.modifiers and "GPU" in line.modifiers for line in arrivals)
    assert any(line.base == "MEMBAR" for line in code.lines)
    # At most a word or two is spilled where the launch bounds leave 32 registers.
    assert sum(line.base in ("LDL", "STL") for line in code.lines) <= 12


def test_only_the_fence_is_missing_where_it_is_to_be_missing(cache_root: Path) -> None:
    for variant, expected in (("missing-fence", 0), ("early-arrival", 0), ("early-exit", 3)):
        image = builtin_image(variant, 90)
        code = disassemble(image.cubin, image.function)
        assert sum(line.base == "MEMBAR" for line in code.lines) == expected, variant
        assert len(poll_loops(code)) == 3


# -- the cases


def test_the_sweep_holds_every_edge() -> None:
    cases = list(all_cases())
    assert len({case.name for case in cases}) == len(cases)
    for k in (512, 1024, 2048):
        for vec in (1, 2, 4):
            mine = [case for case in cases if (case.k, case.vec) == (k, vec)]
            lengths = {length for case in mine for length in case.lengths}
            assert {0, 1, k - 1, k, k + 1, 8191, 8192, 8193, 32767, 32768, 32769} <= lengths
            assert {2, 3, 8} <= {case.ctas_per_group for case in mine if max(case.lengths) > RADIX_THRESHOLD}
    assert {case.ctas_per_group for case in cases} >= set(range(2, 9))
    assert {kind for case in cases for kind in case.data} == set(DATA_KINDS)
    for case in cases:
        assert case.stride % case.vec == 0
        assert case.chunk_size % case.vec == 0
        assert case.chunk_size * case.ctas_per_group >= case.stride
        assert case.dynamic_smem <= 227 * 1024
        assert case.vec == (4 if case.stride % 4 == 0 else 2 if case.stride % 2 == 0 else 1)


def test_data_is_what_its_name_says_and_seeded() -> None:
    rows = {kind: make_row(kind, 4096, np.random.default_rng(1)) for kind in DATA_KINDS}
    for kind, row in rows.items():
        assert (row.dtype, row.shape) == (np.dtype(np.float32), (4096,))
        assert row.tobytes() == make_row(kind, 4096, np.random.default_rng(1)).tobytes()
    assert np.isnan(rows["nan"]).any()
    assert np.isinf(rows["infinities"]).any()
    assert (np.abs(rows["denormal"]) < 1.2e-38).all()
    assert {np.signbit(value) for value in rows["signed-zeros"]} == {True, False}
    assert (rows["dense"].astype(np.float16) == np.float16(1000.0)).all()
    assert (make_row("ascending", 0, np.random.default_rng(1))).shape == (0,)
    with pytest.raises(ValueError, match="no data of kind"):
        make_row("nonsense", 1, np.random.default_rng(1))
    assert sample_cases(5, 1) == sample_cases(5, 1)
    assert len(sample_cases(10_000)) == len(list(all_cases()))
