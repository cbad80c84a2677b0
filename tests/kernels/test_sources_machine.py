"""The builtin kernel's machine code, interpreted: right answers, and each defect as the emulation of its source has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, ROW_STATE_SIZE
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.kernels.reference import check_rows
from dsv4_repro.kernels.sass.machine import Machine
from dsv4_repro.kernels.sass.memory import BASE_ADDRESS
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.verdict import RunResult
from dsv4_repro.kernels.topk_cases import TopKCase, all_cases


@dataclass(frozen=True)
class Interpreted:
    """One launch: its result, each group's counter, the wrong rows, the row states; and the machine, to go on with."""

    result: RunResult
    machine: Machine
    counters: tuple[int, ...]
    wrong: tuple[str, ...]
    states: NDArray[np.uint32]
    states_at: int
    look: Callable[[], tuple[tuple[int, ...], tuple[str, ...], NDArray[np.uint32]]]


@pytest.fixture(scope="module")
def interpret(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Interpreted]:
    root = tmp_path_factory.mktemp("cache")
    programs: dict[object, Program] = {}

    def program(variant: str, sm: int, case: TopKCase, settings: Mapping[str, int]) -> Program:
        key = (variant, sm, case.k, case.vec, tuple(settings.items()))
        if key not in programs:
            image = builtin_image(variant, sm, case.k, case.vec, settings=settings, cache=Cache("cubin", root))
            programs[key] = Program.from_image(image, store=Cache("blocks", root), disassembly_cache=Cache("sass", root))
        return programs[key]

    def run(
        variant: str,
        sm: int,
        case: TopKCase,
        *,
        checks: bool = False,
        schedule: str = "smallest-pc",
        seed: int = 0,
        slots: int = 0,
        **settings: int,
    ) -> Interpreted:
        machine = Machine(program(variant, sm, case, settings), sms=slots or case.grid, checks=checks, schedule=schedule, seed=seed)
        memory = machine.memory
        logits, lengths = case.logits(), np.array(case.lengths, dtype=np.int32)
        at = {
            "input": memory.allocate("input", logits),
            "output": memory.allocate("output", np.full(len(lengths) * case.k, -7, dtype=np.int32)),
            "lengths": memory.allocate("lengths", lengths),
            "row_states": memory.allocate("row_states", np.zeros(case.state_bytes, dtype=np.uint8)),
        }
        result = machine.launch(case.grid, 1024, case.params(**at).pack(), case.dynamic_smem, budget=20_000_000)

        def look() -> tuple[tuple[int, ...], tuple[str, ...], NDArray[np.uint32]]:
            def words(name: str, count: int) -> NDArray[np.uint32]:
                first = (at[name] - BASE_ADDRESS) // 4
                return memory.words[first : first + count].copy()

            output = words("output", len(lengths) * case.k).view(np.int32).reshape(len(lengths), case.k)
            states = words("row_states", case.state_bytes // 4).reshape(case.groups, ROW_STATE_SIZE // 4)
            counters = tuple(int(value) for value in states[:, ARRIVAL_COUNTER_OFFSET // 4].view(np.int32))
            verdicts = check_rows(output, logits, lengths, case.k)
            return counters, tuple(verdict.text for verdict in verdicts if not verdict.ok), states

        counters, wrong, states = look()
        return Interpreted(result, machine, counters, wrong, states, at["row_states"], look)

    return run


def named(name: str, **changes: object) -> TopKCase:
    (case,) = (case for case in all_cases() if case.name == name)
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


PADDED = named("peers leave", lengths=(16000, 16001, 12000, 12001, 9000, 9001, -1, 0))
WIDE = named("peers leave", lengths=(33000, 16001, 12000, 12001, 9000, 9001, 0, 0), stride=40000, chunk_size=20000)
ONLY_GROUP_6 = (0, 0, 0, 0, 0, 0, 1, 0)


def right(run: Interpreted, case: TopKCase) -> bool:
    return run.result.completed and run.wrong == () and run.counters == case.counters()


@pytest.mark.parametrize("sm", [90, 120])
@pytest.mark.parametrize(
    "name",
    ["k512v4 edges", "k512v4 3 CTAs", "k512v4 long-short-long", "k512v4 two groups", "nan k512 one CTA", "equal k512 four CTAs"],
)
def test_the_machine_code_is_right(name: str, sm: int, interpret: Callable[..., Interpreted]) -> None:
    case = named(name)
    assert right(interpret("guard", sm, case), case)


@pytest.mark.parametrize(("sm", "tag"), [(75, "k512v4"), (80, "k1024v2"), (90, "k2048v1"), (100, "k512v1"), (120, "k2048v2")])
def test_other_architectures_and_instances(sm: int, tag: str, interpret: Callable[..., Interpreted]) -> None:
    for name in (f"{tag} edges", f"{tag} two groups"):
        assert right(interpret("guard", sm, named(name)), named(name))


@pytest.mark.parametrize("sm", [90, 120])
def test_every_access_is_in_bounds_aligned_and_of_written_memory(sm: int, interpret: Callable[..., Interpreted]) -> None:
    for name in ("k512v4 edges", "k512v4 long-short-long"):
        run = interpret("guard", sm, named(name), checks=True)
        assert run.result.fault is None
        assert right(run, named(name))


@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedules_change_nothing(seed: int, interpret: Callable[..., Interpreted]) -> None:
    case = named("k512v4 two groups")
    assert right(interpret("guard", 120, case, schedule="random", seed=seed), case)


@pytest.mark.parametrize("sm", [90, 120])
def test_the_hang_is_proved_and_a_count_releases_it(sm: int, interpret: Callable[..., Interpreted]) -> None:
    run = interpret("unguarded", sm, PADDED)
    assert (run.result.kind, run.result.spin, run.counters) == ("deadlock", True, ONLY_GROUP_6)
    assert [cta.block for cta in run.result.resident] == [12]
    polling = [threads for threads in run.result.stuck if threads.state == "polling"]
    assert [(threads.block, threads.threads) for threads in polling] == [(12, (0,))]
    assert polling[0].instruction.startswith("LDG.E.STRONG.GPU")
    assert sum(len(threads.threads) for threads in run.result.stuck) == 1024
    run.machine.poke(run.states_at + 6 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT)
    assert run.machine.resume().completed
    counters, wrong, _ = run.look()
    # The five barriers that were left add an arrival each. Only the padded row is wrong.
    assert counters == (0, 0, 0, 0, 0, 0, RELEASE_COUNT + 5, 0)
    assert [text.split(" (")[0] for text in wrong] == ["row 6"]
    assert right(interpret("guard", sm, PADDED), PADDED)


@pytest.mark.parametrize(
    ("variant", "case", "kind", "counters", "wrong"),
    [
        ("guard-after-cast", PADDED, "deadlock", ONLY_GROUP_6, ["row 6"]),
        ("guard-min-only", PADDED, "completed", (0,) * 8, ["row 6"]),
        ("guard-stride-only", PADDED, "completed", (0,) * 8, []),
        ("guard-stride-only", WIDE, "deadlock", (1, *(0,) * 7), ["row 0"]),
        ("guard-one-path", PADDED, "deadlock", ONLY_GROUP_6, ["row 6"]),
        ("ring-misaligned", named("k512v4 long-short-long"), "completed", (96,), ["row 2", "row 4", "row 6"]),
    ],
)
def test_each_defect_in_the_machine_code(
    variant: str, case: TopKCase, kind: str, counters: tuple[int, ...], wrong: list[str], interpret: Callable[..., Interpreted]
) -> None:
    run = interpret(variant, 120, case)
    assert (run.result.kind, run.counters, [text.split(" (")[0] for text in run.wrong]) == (kind, counters, wrong)


def test_reading_past_the_row_is_caught_by_the_checker(interpret: Callable[..., Interpreted]) -> None:
    case = named("peers leave", lengths=(16000, 16001, 12000, 12001, 9000, 9001, 0, 20000), max_seq_len=32768)
    assert interpret("guard", 120, case, checks=True).result.completed
    run = interpret("guard-max-seq-only", 120, case, checks=True)
    assert run.result.kind == "fault"
    assert run.result.fault is not None
    assert (run.result.fault.space, run.result.fault.block) == ("global", 14)


def test_a_bounded_spin_names_itself(interpret: Callable[..., Interpreted]) -> None:
    run = interpret("bounded-spin", 90, PADDED, spin_limit=64)
    assert (run.result.kind, run.counters) == ("completed", ONLY_GROUP_6)
    assert [int(word) for word in run.states[6, 768:]] == [12, 2, 1, 0xB0DED000]


def test_three_slots_for_a_group_of_four_starve(interpret: Callable[..., Interpreted]) -> None:
    case = named("normal k512 four CTAs", lengths=(40000,), stride=40000, chunk_size=10000)
    run = interpret("guard", 120, case, slots=3)
    assert (run.result.kind, run.result.never_started, run.counters) == ("deadlock", (3,), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("sm", [121])  # the other architectures: sass/test_topk.py, with the counters
def test_the_whole_sweep(sm: int, interpret: Callable[..., Interpreted]) -> None:
    wrong = [case.name for case in all_cases() if not right(interpret("guard", sm, case), case)]
    assert wrong == []
