"""Campaigns: plans, sampling, the store under kill -9 and a full disk, workers that die, comparison, outputs, the verb."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import PlanError, RefusedError, RunStoreError
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign.cells import Cell, TrialResult
from dsv4_repro.repro.campaign.compare import compare_summaries
from dsv4_repro.repro.campaign.hunt import Hunt, Progress
from dsv4_repro.repro.campaign.outputs import campaign_status, junit_of, markdown_summary
from dsv4_repro.repro.campaign.page import campaign_page
from dsv4_repro.repro.campaign.plan import HuntPlan, load_hunt_plan
from dsv4_repro.repro.campaign.pools import LocalPool, Message
from dsv4_repro.repro.campaign.sampler import Block, Sampler
from dsv4_repro.repro.campaign.screen import duration, progress_line, progress_lines
from dsv4_repro.repro.campaign.store import CampaignStore
from dsv4_repro.repro.schemas import schema_of


def plan(**changes: Any) -> HuntPlan:
    document: dict[str, Any] = {
        "name": "t", "budget": {"trials": 12}, "search": {"mode": "exhaustive", "repeat": 3}, "minimise": False,
        "matrix": {"kernel": ["builtin", "builtin:guard"], "mtp": [0, 1]},
    }  # fmt: skip
    return HuntPlan.from_document({**document, **changes})


HANG = TrialResult("hang", 1, True, identity="a" * 12, class_="gpu-spin-barrier", cause="peer-left", windows=("w1",), to_hang_s=0.1)
CLEAN = TrialResult("clean", 1, True, windows=("w1",))


# -- plans ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"surprise": 1}, "surprise"),
        ({"budget": {"hours": 3}}, "hours"),
        ({"budget": {"trials": 0}}, "trials"),
        ({"matrix": {"speed": [1]}}, "'speed' is no factor"),
        ({"matrix": {"mtp": []}}, "at least one value"),
        ({"matrix": {"mtp": [1, 1]}}, "listed twice"),
        ({"matrix": {"mtp": [1, 99]}}, "mtp = 99 is impossible"),
        ({"matrix": {"mtp": 3}}, "list"),
        ({"fixed": {"mtp": 1}}, "in matrix and in fixed"),
        ({"matrix": {"max_model_len": [100]}}, "max_model_len = 100 is impossible"),
        ({"on": "moon"}, "on"),
        ({"search": {"mode": "random"}, "budget": {}}, "never ends"),
        ({"matrix": {"seed": [1, 2]}}, "no factor"),
        ({"matrix": {"kernel": [f"k{n}" for n in range(50_000)], "arch": list(range(50_000)), "device": list(range(50_000)),
                     "sms": list(range(1, 4001)), "slots_per_sm": list(range(1, 4001))}}, "2^62"),
        ({"matrix": {"producer": ["raw", "cooked"]}}, "producer = 'cooked'"),
        ({"matrix": {"schedule": ["fast"]}}, "schedule = 'fast'"),
        ({"matrix": {"arch": ["sm_90", "x"]}}, "arch = 'x'"),
        ({"fixed": {"sms": 0}}, "sms = 0"),
        ({"matrix": {"kernel": [3]}}, "kernel = 3"),
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_names_the_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        plan(**changes)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for text in ("= 1", "\xff", 'name = "x"\nwhat = 1'):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(PlanError, match=r"p\.toml"):
            load_hunt_plan(path)
    assert main(["hunt", str(path)]) == 2
    assert main(["hunt", str(tmp_path / "none.toml")]) == 2
    assert main(["hunt"]) == 2


@pytest.mark.parametrize("mode", ["random", "guided", "exhaustive"])
def test_a_plan_of_10_to_the_12_cells_costs_nothing(mode: str) -> None:
    values = [f"builtin:x{n}" for n in range(1000)]
    great = plan(matrix={"kernel": values, "sms": list(range(1, 1001)), "slots_per_sm": list(range(1, 1001)), "arch":
    list(range(1000))}, search={"mode": mode}, budget={"trials": 10})  # fmt: skip
    assert great.cells == 10**12
    began = time.process_time()
    sampler = Sampler(great, batch=4)
    seen = [sampler.block(number).cell_number for number in (0, 1, 2)]
    assert all(0 <= cell < 10**12 for cell in seen)
    cell = great.cell(10**12 - 1)
    assert (cell.kernel, cell.sms, cell.slots_per_sm, cell.arch) == ("builtin:x999", 1000, 1000, 999)
    assert time.process_time() - began < 2.0


def test_exhaustive_makes_every_cell_and_repetition_once() -> None:
    sampler = Sampler(plan(search={"mode": "exhaustive", "repeat": 5}), batch=2)
    assert sampler.blocks == 12
    blocks = [sampler.block(number) for number in range(12)]
    counts: dict[int, int] = {}
    for block in blocks:
        counts[block.cell_number] = counts.get(block.cell_number, 0) + len(block.numbers)
    assert counts == dict.fromkeys(range(4), 5)
    numbers = [number for block in blocks for number in block.numbers]
    assert len(numbers) == len(set(numbers)) == 20
    assert sampler.block(3) == Sampler(plan(search={"mode": "exhaustive", "repeat": 5}), batch=2).block(3)


def test_guided_goes_where_danger_windows_were_tried_least() -> None:
    tried: dict[str, int] = {}
    guided = Sampler(plan(search={"mode": "guided"}, matrix={"mtp": [0, 1], "min_live": [3, 5], "max_model_len": [65536,
    131000]}), batch=1, counts=lambda: tried)  # fmt: skip
    cells = {guided.block(number).cell_number for number in range(20)}
    for cell in cells:
        assert guided.plan.values_of(cell)["mtp"] == 1, "a cell that reaches no danger window comes last"
    first = guided._windows[next(iter(cells))][0]
    tried[first] = 10_000
    assert any(first not in guided._windows[guided.block(number).cell_number] for number in range(20, 40))


# -- the store -----------------------------------------------------------------------------------------------------------------


def test_a_trial_is_counted_once_and_the_tally_equals_a_recount(tmp_path: Path) -> None:
    with CampaignStore.create(tmp_path / "c", plan()) as store:
        assert store.add(0, 0, {"mtp": 0, "kernel": "builtin"}, HANG, "w")
        assert not store.add(0, 0, {"mtp": 0, "kernel": "builtin"}, CLEAN, "w"), "a number that is stored is not stored again"
        assert store.add_many([(n, n % 4, store.plan.values_of(n % 4), CLEAN if n % 2 else HANG, "w") for n in range(4, 20)]) == 16
        before = store.summary()
        store.recount()
        assert store.summary() == before
        assert before.trials == 17
        assert before.hangs[0].hangs == before.kinds["hang"] == 9
        assert store.done_numbers() == (20, [1, 2, 3])


def test_two_hunts_on_one_store_and_a_campaign_of_another_plan_are_refused(tmp_path: Path) -> None:
    with CampaignStore.create(tmp_path / "c", plan()):
        with pytest.raises(RefusedError, match="another hunt"):
            CampaignStore.resume(tmp_path / "c", plan())
        with CampaignStore.read(tmp_path / "c") as looked:
            assert looked.summary().trials == 0, "looking is allowed"
        locked = subprocess.run(
            [sys.executable, "-m", "dsv4_repro.repro", "hunt", "--status", str(tmp_path / "c")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert locked.returncode == 5
    with pytest.raises(RefusedError, match="holds a campaign already"):
        CampaignStore.create(tmp_path / "c", plan())
    with pytest.raises(RefusedError, match="another plan"):
        CampaignStore.resume(tmp_path / "c", plan(fixed={"layers": 2}))
    CampaignStore.resume(tmp_path / "c", plan(budget={"trials": 99})).close()  # a budget may change
    with pytest.raises(RunStoreError, match="no campaign here"):
        CampaignStore.resume(tmp_path / "nothing", plan())


def test_a_full_disk_is_a_typed_error_and_what_was_written_stays(tmp_path: Path) -> None:
    with CampaignStore.create(tmp_path / "c", plan()) as store:
        store.add(0, 0, {}, CLEAN, "w")
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        long: list[tuple[int, int, Mapping[str, Any], TrialResult, str]] = [
            (number, 0, {}, TrialResult("other", 1, why="x" * 1000), "w") for number in range(1, 2000)
        ]
        with pytest.raises(RunStoreError, match="full") as caught:
            deque((store.add_many([one]) for one in long), maxlen=0)
        assert "--resume" in caught.value.help_text
        trials = store.summary().trials
    with CampaignStore.resume(tmp_path / "c", plan()) as again:
        assert again.summary().trials == trials == again.done_numbers()[0]
        assert again.add(trials, 0, {}, CLEAN, "w")


@pytest.mark.parametrize("damage", ["junk", "empty", "other"])
def test_a_store_that_is_none(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    path = folder / "campaign.sqlite"
    if damage == "other":
        sqlite3.connect(path).execute("CREATE TABLE meta (key, value)").connection.close()
    else:
        path.write_bytes(b"junk " * 1000 if damage == "junk" else b"")
    with pytest.raises(RunStoreError):
        CampaignStore.read(folder)
    assert main(["hunt", "--status", str(folder)]) == 5


# -- the loop ------------------------------------------------------------------------------------------------------------------


class FakePool:
    """Runs blocks at once. ``dies``: trial numbers that kill their worker, so often."""

    def __init__(self, answer: Callable[[Block, int], TrialResult], slots: int = 2, dies: dict[int, int] | None = None) -> None:
        self.answer, self.slots, self.dies = answer, slots, dies or {}
        self.queue: deque[Block] = deque()
        self.made: list[int] = []

    def free(self) -> int:
        return self.slots - len(self.queue)

    def submit(self, block: Block) -> None:
        self.queue.append(block)

    def poll(self, _timeout: float) -> list[Message]:
        block = self.queue.popleft()
        found: list[Message] = []
        for number, seed in zip(block.numbers, block.seeds, strict=True):
            if self.dies.get(number, 0) > 0:
                self.dies[number] -= 1
                done = [message.number for message in found if message.number is not None]
                return [*found, Message("lost", "w", block.without(done), why="signal 9")]
            self.made.append(number)
            found.append(Message("result", "w", block, number, self.answer(block, seed)))
        return [*found, Message("done", "w", block)]

    def doing(self) -> list[str]:
        return ["w: busy"]

    def close(self) -> None: ...


def by_cell(block: Block, _seed: int) -> TrialResult:
    return HANG if block.cell.kernel == "builtin" and block.cell.plan.get("mtp") == 1 else CLEAN


def hunted(folder: Path, the_plan: HuntPlan, pool: FakePool, *, resume: bool = False, **more: Any) -> tuple[str, Any]:
    opened = CampaignStore.resume(folder, the_plan) if resume else CampaignStore.create(folder, the_plan)
    with opened as store:
        why = Hunt(the_plan, store, pool, Sampler(the_plan, batch=2), **more).run()
        return why, store.summary()


def test_a_hunt_ends_with_its_budget_to_the_trial_and_goes_on(tmp_path: Path) -> None:
    first = FakePool(by_cell)
    why, summary = hunted(tmp_path / "c", plan(budget={"trials": 7}), first)
    assert (why, summary.trials) == ("trials", 7)
    second = FakePool(by_cell)
    why, summary = hunted(tmp_path / "c", plan(budget={}), second, resume=True)
    assert (why, summary.trials) == ("nothing left", 12)
    assert sorted(first.made + second.made) == sorted({*first.made, *second.made}), "no trial twice"
    assert summary.factors["kernel"]["builtin:guard"] == {"clean": 6}


def test_a_worker_that_is_lost_costs_nothing_but_a_trial_that_kills_three(tmp_path: Path) -> None:
    pool = FakePool(by_cell, dies={3: 1, 5: 99})
    why, summary = hunted(tmp_path / "c", plan(budget={}), pool)
    assert (why, summary.trials) == ("nothing left", 12)
    assert summary.kinds["other"] == 1
    assert len(pool.made) == len(set(pool.made)) == 11
    with CampaignStore.read(tmp_path / "c") as store:
        assert len(store.events("worker lost")) == 4


def test_a_clock_that_jumps_does_not_end_a_hunt(tmp_path: Path) -> None:
    clock = FakeClock()

    def jumping(block: Block, seed: int) -> TrialResult:
        clock.jump(-1e6 if seed % 2 else 1e9)
        clock.advance(1.0)
        return by_cell(block, seed)

    endless = plan(search={"mode": "random"}, budget={"minutes": 0.5})
    why, summary = hunted(tmp_path / "c", endless, FakePool(jumping, slots=1), clock=clock)
    assert why == "minutes"
    assert 28 <= summary.trials <= 32


def test_budgets_of_hangs_and_of_gpu_hours(tmp_path: Path) -> None:
    why, _summary = hunted(tmp_path / "a", plan(search={"mode": "random"}, budget={"hangs": 1}), FakePool(by_cell))
    assert why == "hangs"
    clock = FakeClock()

    def slow(block: Block, seed: int) -> TrialResult:
        clock.advance(60.0)
        return by_cell(block, seed)

    gpu = plan(on="gpu", search={"mode": "random"}, budget={"gpu_hours": 1.0})
    why, summary = hunted(tmp_path / "b", gpu, FakePool(slow, slots=1), clock=clock, workers=4)
    assert why == "gpu_hours"
    assert 14 <= summary.trials <= 17, "an hour of four GPUs is a quarter of an hour"


# -- processes -----------------------------------------------------------------------------------------------------------------


def collect(pool: LocalPool, blocks: int, seconds: float = 60.0) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + seconds
    while sum(message.kind in ("done", "lost") for message in found) < blocks and time.monotonic() < deadline:
        found += pool.poll(0.2)
    return found


def test_a_worker_killed_in_the_middle_is_replaced_and_its_trial_given_back() -> None:
    pool = LocalPool([None])
    try:
        many = plan(search={"mode": "exhaustive", "repeat": 400}, budget={"trials": 400})
        block = Sampler(many, batch=400).block(0)
        pool.submit(block)
        heard: list[Message] = []
        while not any(message.kind == "result" for message in heard):
            heard += pool.poll(0.5)
        os.kill(pool.processes[0], signal.SIGKILL)
        heard += collect(pool, 1)
        lost = next(message for message in heard if message.kind == "lost")
        assert lost.block is not None
        reported = {message.number for message in heard if message.kind == "result"}
        assert reported | set(lost.block.numbers) == set(block.numbers)
        assert not reported & set(lost.block.numbers)
        pool.submit(block.without(block.numbers[2:]))
        again = collect(pool, 1)
        assert [message.result.kind for message in again if message.result is not None] == ["no window"] * 2
    finally:
        pool.close()


def test_a_worker_that_hangs_is_ended_after_its_limit() -> None:
    pool = LocalPool([None], trial_limit_s=0.0)
    try:
        pool.submit(Sampler(plan(), batch=1).block(0))
        lost = collect(pool, 1)[-1]
        assert lost.kind == "lost"
        assert "longer than" in lost.why
    finally:
        pool.close()


def write_plan(tmp_path: Path, *, trials: int, extra: str = "") -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(
        f'name = "n"\nminimise = false\n[budget]\ntrials = {trials}\n[search]\nmode = "exhaustive"\nrepeat = {trials}\n{extra}'
        '[matrix]\nkernel = ["builtin", "builtin:guard"]\n[fixed]\nlayers = 1\n'
    )
    return path


def test_kill_9_at_any_moment_loses_only_trials_in_flight(tmp_path: Path) -> None:
    path, folder = write_plan(tmp_path, trials=30), tmp_path / "c"
    words = [sys.executable, "-m", "dsv4_repro.repro", "hunt", str(path), "--out", str(folder), "--workers", "1"]
    seen = 0
    for attempt in range(2):
        running = subprocess.Popen(
            [*words, *(["--resume"] if attempt else [])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.05)
            if (folder / "campaign.sqlite").exists():
                with CampaignStore.read(folder) as store:
                    now = store.summary().trials
                if now >= seen + 3:
                    break
        running.send_signal(signal.SIGKILL)
        running.wait(30)
        with CampaignStore.read(folder) as store:
            assert store.summary().trials >= seen + 3, "what was stored is there"
            seen = store.summary().trials
    done = subprocess.run([*words, "--resume", "--json"], capture_output=True, text=True, timeout=120, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["trials"], document["outcome"]) == (3, 30, "hang")
    assert sum(document["kinds"].values()) == 30
    numbers = [row[0] for row in sqlite3.connect(folder / "campaign.sqlite").execute("SELECT number FROM trials")]
    assert len(numbers) == len(set(numbers)) == 30


def test_hunt_from_the_command_line_shrinks_and_bundles_the_first_of_its_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    monkeypatch.chdir(tmp_path)
    path, folder = write_plan(tmp_path, trials=8), Path("c")  # relative, as the default is
    path.write_text(path.read_text().replace("minimise = false", "minimise = true"))
    status = main(["hunt", str(path), "--out", str(folder), "--workers", "1", "--json", "--junit", str(tmp_path / "j.xml")])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (status, document["trials"], document["kinds"]) == (3, 8, {"hang": 4, "clean": 4})
    assert "HANG: the budget of trials is used up" in captured.err
    assert f"next: python {folder / document['hangs'][0]['minimised']}" in captured.err
    jsonschema.validate(document, schema_of("hunt"))
    (hang,) = document["hangs"]
    assert (hang["signature"], hang["hangs"]) == ("vllm-51593", 4)
    assert (folder / hang["minimised"]).is_file()
    assert (folder / hang["bundle"]).is_file()
    assert json.loads((folder / "hangs" / hang["identity"] / "minimised.json").read_text())["case"]["lengths"] == [-1]
    assert "51593" in (tmp_path / "step.md").read_text()
    assert ET.parse(tmp_path / "j.xml").getroot().find("testsuite").get("failures") == "1"  # type: ignore[union-attr]
    page = (folder / "campaign.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    # The same campaign compared with itself: nothing is new, so --fail-on new is content.
    status = main(["hunt", "--status", str(folder), "--compare", str(folder), "--fail-on", "new", "--json"])
    assert (status, json.loads(capsys.readouterr().out)["compared"][0]["word"]) == (0, "same")


# -- comparison and outputs ----------------------------------------------------------------------------------------------------


def summary_of(tmp_path: Path, name: str, results: list[TrialResult]) -> Any:
    with CampaignStore.create(tmp_path / name, plan(name=name)) as store:
        store.add_many([(number, 0, {"mtp": 1}, result, "w") for number, result in enumerate(results)])
        return store.summary()


def test_new_gone_not_seen_and_changed(tmp_path: Path) -> None:
    other = TrialResult("hang", 1, True, identity="b" * 12)
    often = summary_of(tmp_path, "often", [HANG] * 50 + [CLEAN] * 50)
    never = summary_of(tmp_path, "never", [CLEAN] * 100)
    few = summary_of(tmp_path, "few", [CLEAN] * 3)
    rarely = summary_of(tmp_path, "rarely", [HANG] * 5 + [CLEAN] * 95 + [other])
    none = summary_of(tmp_path, "none", [TrialResult("no window", 1)] * 9)

    def words(now: Any, before: Any) -> list[tuple[str, str]]:
        return [(change.identity[0], change.word) for change in compare_summaries(now, before)]

    assert words(often, never) == [("a", "new")]
    assert words(never, often) == [("a", "gone")]
    assert words(few, often) == [("a", "not seen")], "three clean windows say nothing of a rate of one half"
    assert words(none, often) == [("a", "not seen")]
    assert words(rarely, often) == [("b", "new"), ("a", "changed")]
    assert words(often, often) == [("a", "same")]
    assert campaign_status(often, compare_summaries(often, often), "new") == ("clean", 0)
    assert campaign_status(often, compare_summaries(often, never), "new") == ("hang", 3)
    assert campaign_status(none, None, "any") == ("inconclusive", 5)
    assert campaign_status(never, None, "any") == ("clean", 0)
    assert campaign_status(summary_of(tmp_path, "w", [CLEAN, TrialResult("wrong", 1, True)]), None, "any") == ("other", 4)
    assert ET.fromstring(junit_of(none)).find("testsuite").get("errors") == "1"  # type: ignore[union-attr]


def test_outputs_escape_whatever_stands_in_the_store(tmp_path: Path) -> None:
    evil = TrialResult(
        "hang", 1, True, identity="<script>alert(1)</script>", class_="|x\n\x00", cause="</td>", windows=("<b>",), to_hang_s=0.0
    )
    summary = summary_of(tmp_path, "c", [evil, CLEAN])
    page = campaign_page(summary, [("x", 0.0)], None, ["<img>"])
    assert "<script>" not in page
    assert "<img>" not in page
    ET.fromstring(junit_of(summary))
    rows = [line for line in markdown_summary(summary).splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {6}


def test_the_screen_says_what_a_person_wants_to_know() -> None:
    progress = Progress(120, 334.6, {"dd4289b0e668": 31}, ["worker-0: cell 5, 0.1 s"], 3700.0, 61.0, 1)
    assert progress_line(progress) == "120 trials, 335 a minute, dd4289b0e668 x 31, 1 workers lost, ends in 1 h 01 min"
    assert progress_lines(progress)[-1] == "  worker-0: cell 5, 0.1 s"
    assert (duration(None), duration(12.9), duration(200)) == ("not known", "12 s", "3 min 20 s")


def test_a_million_trials_are_summed_up_at_once(tmp_path: Path) -> None:
    """The figure is benchmarks/campaign.py's; here a twentieth of it, whose summary must not read the trials."""
    with CampaignStore.create(tmp_path / "c", plan()) as store:
        store.add_many([(n, n % 4, {"mtp": n % 2, "kernel": "k"}, HANG if n % 7 == 0 else CLEAN, "w") for n in range(50_000)])
        began = time.process_time()
        summary = store.summary()
        assert time.process_time() - began < 0.2
        assert summary.trials == 50_000


def test_cells_survive_json_and_make_a_command() -> None:
    cell = Cell(name="x", kernel="builtin", arch=90, plan={"mtp": 3, "capture_sizes": [4, 8], "layers": None}, sms=2)
    assert Cell.from_document(json.loads(json.dumps(cell.document()))).key == cell.key
    assert cell.command(7) == (
        "dsv4-repro", "run", "drain", "--on", "cpu", "--kernel", "builtin", "--seed", "7", "--arch", "sm_90", "--sms", "2",
        "--mtp", "3", "--capture-sizes", "4,8",
    )  # fmt: skip
    with pytest.raises(PlanError):
        Cell.from_document({"name": "x", "surprise": 1})
