"""Groups larger than what is read in full: what the counter and the list of resident blocks allow to say, and what not.

The transcript is a real card's (H200, 132 SMs, 2 blocks on each): a group of 300, of which 264 hold every slot; 16 blocks were read
in full, 16 more by their SM's table. Lines of the process's host threads are left out.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import re
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.autopsy import autopsy_paths
from dsv4_repro.forensics.collect.cuda_gdb import SCRIPTS
from dsv4_repro.forensics.cuda_gdb_text import parse_transcript
from dsv4_repro.forensics.device_state import CtaState
from dsv4_repro.forensics.diagnose import diagnose_state
from dsv4_repro.forensics.records import Diagnosis

PLACE = Path(__file__).parent / "recorded" / "cuda_gdb-300-blocks-on-264-slots.txt.xz"
REAL = lzma.decompress(PLACE.read_bytes()).decode()
COUNTER = "(cuda-gdb) print *(@global int*)0x7fb7f8c00c08\n$1 = 264"
MISSING = tuple(range(264, 300))


def judged(text: str, *, hung: bool = True) -> Diagnosis:
    return diagnose_state(parse_transcript(text), ground="gpu", hung=hung)


def verdict(found: Diagnosis) -> tuple[str, str | None, str]:
    return found.verdict.class_, found.verdict.cause, found.verdict.confidence


def with_counter(value: int) -> str:
    """The transcript with another count in memory and in the registers of those that had polled it."""
    assert COUNTER in REAL
    text = REAL.replace(COUNTER, COUNTER.replace("264", str(value)))
    return re.sub(r"^(R4 +)0x108 +264", lambda match: f"{match[1]}{value:#x} {value}", text, flags=re.MULTILINE)


# --- the look as it was taken -------------------------------------------------------------------------------------------------


def test_members_that_were_not_read_are_counted_by_the_counter_and_said_to_be() -> None:
    found = judged(REAL)
    assert verdict(found) == ("gpu-spin-barrier", "not-co-resident", "medium")
    assert found.verdict.signature == "vllm-41834"
    (group,) = found.ledger
    assert group.never_started == MISSING
    assert len(group.spinning) == 32
    assert len(group.unknown) == 232, "resident, but nobody looked: neither waiting nor at work"
    assert not group.running
    assert "232 blocks are resident, but where they stand was not read" in group.inferred
    assert "no SM has threads for another block" in group.inferred
    assert "by the counter: 232 of them not read" in found.verdict.sentence
    assert [item.what for item in found.unread] == ["warps of 232 resident blocks of kernel 0"]


def test_one_look_deduces_nothing_of_members_that_were_not_read() -> None:
    found = judged(REAL, hung=False)
    assert found.verdict.cause is None


@pytest.mark.parametrize("value", [0, 1, 200, 263, 265, 299])
def test_another_count_is_not_explained_and_the_missing_stay_unknown(value: int) -> None:
    found = judged(with_counter(value))
    assert found.verdict.cause is None
    (group,) = found.ledger
    assert group.never_started == ()
    assert set(MISSING) <= set(group.unknown)
    assert "not known" in group.inferred


def test_a_file_in_somebodys_hands_is_judged_by_the_same_count(tmp_path: Path) -> None:
    for value, cause in ((264, "not-co-resident"), (263, None), (100, None), (265, None)):
        place = tmp_path / f"{value}.txt"
        place.write_text(with_counter(value))
        found = autopsy_paths([place]).diagnosis
        assert verdict(found)[:2] == ("gpu-spin-barrier", cause), value
        assert "not the arrivals of the 264 resident members" in found.verdict.sentence or cause


@pytest.mark.parametrize("gone", [40, 120, 200])
def test_a_hole_in_the_middle_is_a_block_that_has_left(gone: int) -> None:
    found = judged(re.sub(rf"^ *\({gone},0,0\) running .*\n", "", REAL, flags=re.MULTILINE))
    assert found.verdict.cause is None
    (group,) = found.ledger
    assert gone in group.exited


@pytest.mark.parametrize("kept", [0, 17, 100, 263])
def test_a_list_with_its_end_cut_off_is_no_list(kept: int) -> None:
    """The script says how many blocks it was shown: fewer rows than that, and no block is known to be missing."""
    text = REAL.replace("dsv4-repro: 264 blocks resident", "dsv4-repro: kernel 0: 264 blocks resident")
    head, rest = text.split("Kernel 0\n", 1)
    rows, tail = rest.split("dsv4-repro: kernel 0", 1)
    cut = head + "Kernel 0\n" + "".join(rows.splitlines(keepends=True)[:kept]) + "dsv4-repro: kernel 0" + tail
    found = judged(cut)
    assert found.verdict.cause is None
    assert not any(group.never_started or group.exited for group in found.ledger)
    assert any("not whole" in item.why for item in found.unread)


# --- the look as the script takes it now --------------------------------------------------------------------------------------


class Replay(types.ModuleType):
    """cuda-gdb's module, with the answers of the transcript; a block that was not read then stands where block 1 stood.

    ``working``: blocks whose thread 0 stands elsewhere in the kernel. ``slow``: seconds that each change of focus takes.
    """

    class error(Exception):  # noqa: N801, N818 - its name in the debugger
        pass

    def __init__(self, working: tuple[int, ...] = ()) -> None:
        super().__init__("gdb")
        self.asked = list[str]()
        self.working = working
        self.block = 0
        self.answers = dict[tuple[int | None, str], str]()
        block: int | None = None
        body = REAL.split("dsv4-repro: stage reading 0.001\n", 1)[1]
        for part in re.split(r"^\(cuda-gdb\) ", body, flags=re.MULTILINE)[1:]:
            command, _, answer = part.partition("\n")
            answer = re.sub(r"^dsv4-repro:.*\n?", "", answer, flags=re.MULTILINE)
            focus = re.match(r"cuda kernel 0 block \((\d+),0,0\)", command)
            block = int(focus[1]) if focus else block
            self.answers[block, command] = answer
        self.sm = {int(one): int(sm) for one, sm in re.findall(r"^\*? *\((\d+),0,0\) running +0 +(\d+)", REAL, re.MULTILINE)}
        self.polling = {
            int(one): int(warp)
            for warp, one in re.findall(r"^\*? +(\d+) .* \((\d+),0,0\) +\([01],0,0\) *$", REAL, re.MULTILINE)
        }  # fmt: skip

    def execute(self, command: str, to_string: bool = False) -> str:
        self.asked.append(command)
        focus = re.fullmatch(r"cuda kernel 0 block \((\d+),0,0\) thread \(0,0,0\)", command)
        if focus:
            self.block = int(focus[1])
            known = self.answers.get((self.block, command))
            return known if known is not None else self.focused()
        if command == "info registers" or not command.startswith("info registers "):
            return next((self.answers[key, command] for key in (self.block, None, 0) if (key, command) in self.answers), "")
        lines = self.answers[self.block if self.block < 16 else 1, "info registers"].splitlines()
        wanted = [name.lstrip("$") for name in command.split()[2:]]
        shown = {line.split()[0]: line for line in lines if line.strip()}
        if missing := [name for name in wanted if name not in shown]:
            raise self.error(f"Invalid register `{missing[0]}'")
        return "\n".join(shown[name] for name in wanted)

    def focused(self) -> str:
        pc = 0x7FB7FB7A3860 if self.block in self.working else 0x7FB7FB7A39E0
        second = any(one < self.block for one, sm in self.sm.items() if sm == self.sm[self.block])
        warp = self.polling.get(self.block, 32 if second else 0)
        head = f"CUDA kernel 0, grid 3, block ({self.block},0,0), thread (0,0,0), device 0, sm {self.sm[self.block]}, warp {warp}"
        name = "void dsv4_repro::persistent::persistent_topk_kernel<512, 4u>(dsv4_repro::persistent::PersistentTopKParams)"
        return f"[Switching focus to {head}, lane 0]\n{pc:#018x} in {name}<<<(300,1,1),(1024,1,1)>>> ()"

    def parse_and_eval(self, expression: str) -> int:
        name = expression.lstrip("$")
        text = self.answers[self.block if self.block < 16 else 1, "info registers"]
        found = re.search(rf"^{name}\s+(0x[0-9a-f]+)", text, re.MULTILINE)
        if not found:
            raise self.error(f"no register {expression}")
        return int(found[1], 16)


Look = Callable[..., tuple[Replay, str]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Look:
    def run(working: tuple[int, ...] = (), **settings: Any) -> tuple[Replay, str]:
        module = Replay(working)
        monkeypatch.setitem(sys.modules, "gdb", module)
        monkeypatch.setenv("DSV4_REPRO_GDB", json.dumps(settings))
        runpy.run_path(str(SCRIPTS / "hang.py"))
        return module, REAL.split("dsv4-repro: stage reading")[0] + capsys.readouterr().out

    return run


def test_the_script_looks_at_every_resident_block(look: Look, tmp_path: Path) -> None:
    module, text = look()
    assert "dsv4-repro: kernel 0: 264 blocks resident, 16 of them read in full" in text
    brief = [command for command in module.asked if command.startswith("info registers $")]
    assert len(brief) == 248
    assert {"$R4", "$R6", "$R7", "$R9"} <= set(brief[0].split()[2:])
    assert "failed" not in text
    found = judged(text)
    assert verdict(found) == ("gpu-spin-barrier", "not-co-resident", "high")
    (group,) = found.ledger
    assert group.spinning == tuple(range(264))
    assert group.never_started == MISSING
    assert not group.unknown
    assert not group.running
    assert {(wait.value, wait.target) for wait in found.waits} == {(264, 300)}
    assert "not read" not in found.verdict.sentence
    assert [item.what for item in found.unread] == ["the other warps of 232 resident blocks of kernel 0"]
    place = tmp_path / "cuda_gdb.txt"
    place.write_text(text)
    assert verdict(autopsy_paths([place]).diagnosis) == ("gpu-spin-barrier", "not-co-resident", "high")


def test_a_member_that_is_at_work_is_seen_to_be(look: Look) -> None:
    """Its thread 0 is in the kernel, not at the wait: it may still arrive, and the count says nothing about it."""
    _module, text = look(working=(200,))
    found = judged(text)
    assert found.verdict.cause is None
    assert found.ledger[0].running == (200,)


def test_brief_reading_ends_with_its_time_and_says_what_is_left(look: Look) -> None:
    _module, text = look(brief_s=0.0)
    assert "dsv4-repro: the time for brief reading is over: 248 blocks of kernel 0 not read" in text
    found = judged(text)
    assert verdict(found) == ("gpu-spin-barrier", "not-co-resident", "medium")
    assert len(found.ledger[0].unknown) == 232


def test_brief_reading_leaves_time_to_detach(look: Look) -> None:
    module, text = look(deadline_s=1.5, detach=True)
    assert "brief reading is over" in text
    assert "out of time" not in text
    assert module.asked[-1] == "detach"


# --- the transcript as a file ---------------------------------------------------------------------------------------------------

FROZEN = "\n\n".join(
    f'=== /metrics {look} ===\nvllm:num_requests_running{{engine="0",model_name="m"}} 2.0\n'
    'vllm:generation_tokens_total{engine="0",model_name="m"} 812.0'
    for look in (1, 2)
)
_SURE = {"low": 1, "medium": 2, "high": 3}


def autopsied(text: str, place: Path, *more: str) -> Diagnosis:
    place.write_text("\n\n".join([f"=== cuda-gdb -p 9021 ===\n{text}", *more]) if more else text)
    return autopsy_paths([place]).diagnosis


@pytest.mark.parametrize("more", [(), (FROZEN,)])
def test_lines_are_no_surer_than_the_full_reader_of_them(tmp_path: Path, more: tuple[str, ...]) -> None:
    """232 members were not read: whoever reads the file knows it too, alone or beside a server that stands."""
    found, full = autopsied(REAL, tmp_path / "look.txt", *more), judged(REAL)
    assert verdict(found) == verdict(full) == ("gpu-spin-barrier", "not-co-resident", "medium")
    # Two published cases have this cause: the catalogue must not name another one than the reader that counts groups.
    assert found.verdict.signature in (None, full.verdict.signature)


@pytest.mark.parametrize("value", [1, 132, 200, 263, 264, 265, 299])
@pytest.mark.parametrize("read", ["all", "values", "memory"])
def test_whatever_was_read_lines_are_no_surer_than_the_full_reader(tmp_path: Path, value: int, read: str) -> None:
    text = with_counter(value)
    if read == "values":
        text = text.replace(COUNTER.replace("264", str(value)), "")
    elif read == "memory":
        text = re.sub(r"^R4 +.*\n", "", text, flags=re.MULTILINE)
    full, found = judged(text), autopsied(text, tmp_path / "look.txt")
    if found.verdict.cause is not None and found.verdict.cause == full.verdict.cause:
        assert _SURE[found.verdict.confidence] <= _SURE[full.verdict.confidence]


# --- the whole kind -------------------------------------------------------------------------------------------------------------


def group_of(scene: Any, grid: int, resident: int, value: int, *, read: int, **what: Any) -> Any:
    """One group on a card with 264 slots: ``read`` of the resident blocks read, of the others only that they are there."""
    base = scene(
        grid=grid, ctas=grid, spinning=dict.fromkeys(range(resident), (value, grid)), warps=1, lanes=1,
        **{"max_seq_len": 262144, **what},
    ).state()  # fmt: skip
    first = base.grids[0]
    assert first.ctas is not None
    ctas = tuple(cta if at < read else CtaState(cta.block_idx, cta.sm, ()) for at, cta in enumerate(first.ctas))
    return dataclasses.replace(base, grids=(dataclasses.replace(first, ctas=ctas),))


@pytest.mark.parametrize("grid", [265, 266, 300, 528, 1000, 2000])
@pytest.mark.parametrize("read", [1, 16, 263, 264])
def test_every_size_beyond_the_card(scene: Any, grid: int, read: int) -> None:
    found = diagnose_state(group_of(scene, grid, 264, 264, read=read), ground="gpu", hung=True)
    assert verdict(found) == ("gpu-spin-barrier", "not-co-resident", "high" if read == 264 else "medium")
    (group,) = found.ledger
    assert group.never_started == tuple(range(264, grid))
    assert len(group.spinning) == read
    assert group.unknown == tuple(range(read, 264))


@pytest.mark.parametrize("grid", [265, 300, 2000])
@pytest.mark.parametrize("read", [16, 264])
@pytest.mark.parametrize("value", [1, 132, 263, 265])
def test_a_counter_that_is_not_the_residents(scene: Any, grid: int, read: int, value: int) -> None:
    if value >= grid:
        value = grid + 1
    found = diagnose_state(group_of(scene, grid, 264, value, read=read), ground="gpu", hung=True)
    assert found.verdict.cause != "not-co-resident"
    assert not any(group.never_started for group in found.ledger)


@pytest.mark.parametrize("resident", [1, 100, 131])
def test_fewer_than_the_card_holds_never_starts_nothing(scene: Any, resident: int) -> None:
    """With room left a block that is missing has been there: it is not said never to have started."""
    found = diagnose_state(group_of(scene, 300, resident, resident, read=min(resident, 16)), ground="gpu", hung=True)
    assert found.verdict.cause != "not-co-resident"
    assert found.ledger[0].never_started == ()


def test_a_later_phase_was_reached_by_all(scene: Any) -> None:
    """Members that wait at the second phase have met all of the group at the first: none of it never started."""
    state = group_of(scene, 300, 264, 264, read=264)
    later = scene(
        grid=300, ctas=300, spinning=dict.fromkeys(range(264), (564, 600)), warps=1, lanes=1, max_seq_len=262144
    ).state()  # fmt: skip
    found = diagnose_state(dataclasses.replace(state, grids=later.grids), ground="gpu", hung=True)
    assert found.verdict.cause is None
    assert found.ledger[0].never_started == ()
    assert "later phase" in found.ledger[0].inferred


def test_peers_that_leave_at_entry_are_still_peers_that_left(scene: Any) -> None:
    """A short row's leader alone at its barrier on an empty card, its own peer gone: many blocks do not make it another cause."""
    found = diagnose_state(scene(grid=600, spinning={12: (1, 2)}).state(), ground="gpu", hung=True)
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "high")
    assert found.ledger[6].exited == (13,)


def test_a_block_of_which_one_thread_was_read_is_not_said_to_wait_inside(scene: Any) -> None:
    """Thread 0 at a barrier of the block says nothing of warps that nobody looked at."""
    state = scene(grid=2, ctas=2, spinning={0: (1, 2), 1: (1, 2)}, warps=2).state()
    first = state.grids[0]
    assert first.ctas is not None
    for partial in (False, True):
        inside = tuple(dataclasses.replace(cta, warps=cta.warps[1:], partial=partial) for cta in first.ctas)
        found = diagnose_state(
            dataclasses.replace(state, grids=(dataclasses.replace(first, ctas=inside),)), ground="gpu", hung=True
        )  # fmt: skip
        assert found.verdict.class_ == "gpu-kernel-stuck"
        assert ("could not be read" in found.verdict.sentence) == partial


def test_who_holds_the_room_is_said(scene: Any) -> None:
    """Another kernel on the same device holds slots: the waiting blocks alone do not, and that kernel is not called innocent."""
    state = scene(grid=4, ctas=4, spinning=dict.fromkeys(range(3), (3, 4)), warps=1, lanes=1, max_seq_len=40000).state()
    own = state.grids[0]
    held = scene(grid=261, ctas=261, running=range(261), spinning={}, warps=1, lanes=1).state().grids[0]
    assert own.ctas is not None
    assert held.ctas is not None
    for waits_inside in (False, True):
        ctas = tuple(
            dataclasses.replace(cta, sm=(index + 3) % 132, warps=cta.warps if not waits_inside else own.ctas[0].warps)
            for index, cta in enumerate(held.ctas)
        )  # fmt: skip
        other = dataclasses.replace(held, kernel="holder", grid_id=9, ctas=ctas, params=None)
        found = diagnose_state(dataclasses.replace(state, grids=(own, other)), ground="gpu", hung=True)
        assert found.verdict.cause == ("not-co-resident" if waits_inside else None), "a block at work may end and make room"
        assert found.ledger[0].never_started == (3,)
        if waits_inside:
            assert "block 3 never started, because these and 261 blocks of holder hold the room" in found.verdict.sentence
            notes = (found.model_extra or {})["notes"]
            assert any("its blocks hold room that the group lacks" in note for note in notes)
            assert not any("is not the culprit" in note for note in notes)
