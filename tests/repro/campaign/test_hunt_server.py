"""hunt on the server ground: plans, the pool with scripted sessions, and the whole verb on the stand-in (a test double)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.clock import Deadline, FakeClock
from dsv4_repro.errors import PlanError, ServerError, UsageError
from dsv4_repro.repro.campaign.cells import Cell, TrialResult
from dsv4_repro.repro.campaign.hunt_run import HuntFlags, run_hunt
from dsv4_repro.repro.campaign.plan import HuntPlan
from dsv4_repro.repro.campaign.sampler import Block, windows_of_cell
from dsv4_repro.repro.campaign.server_pool import ServerPool
from dsv4_repro.repro.options import Common
from dsv4_repro.repro.schemas import schema_of

SITE = Path(__file__).parents[2] / "standin" / "site"


def _plan(**changes: Any) -> HuntPlan:
    document: dict[str, Any] = {
        "name": "s", "on": "server", "budget": {"trials": 4}, "search": {"mode": "exhaustive", "repeat": 2},
        "fixed": {"model": "dummy"}, "matrix": {"flags": ["", "--enforce-eager"]},
    }  # fmt: skip
    return HuntPlan.from_document({**document, **changes})


def test_engine_flags_and_length_distributions_are_factors() -> None:
    lengths = [{"prompt": "64:64", "output": [8, 8]}, {"prompt": [64, 512]}]
    plan = _plan(matrix={"flags": ["", "--enforce-eager", ["--max-num-seqs", "8"]], "guard": [False, True], "lengths": lengths})
    assert plan.cells == 12
    cells = [plan.cell(number) for number in range(plan.cells)]
    assert len({cell.key for cell in cells}) == 12
    assert [cell.server["flags"] for cell in cells[:3]] == [(), ("--enforce-eager",), ("--max-num-seqs", "8")]
    assert {cell.server["guard"] for cell in cells} == {False, True}
    assert cells[0].drain(1).prompt == (64, 64)
    assert cells[11].drain(1).prompt == (64, 512)
    assert Cell.from_document(json.loads(json.dumps(cells[5].document()))).key == cells[5].key
    assert HuntPlan.from_document(plan.document()).key == plan.key


def test_lengths_are_a_factor_of_the_other_grounds_too() -> None:
    plan = _plan(on="cpu", fixed={}, matrix={"lengths": [{"prompt": "64:64"}, {"prompt": "64:512", "output": 9}]})
    assert plan.cell(1).drain(1).output == (9, 9)
    assert plan.cell(1).server == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fixed": {}}, "needs a model"),
        ({"matrix": {"kernel": ["builtin"]}}, "kernel is no factor of on = 'server'"),
        ({"on": "cpu", "fixed": {}}, "flags is no factor of on = 'cpu'"),
        ({"matrix": {"flags": ["'"]}}, "not flags"),
        ({"matrix": {"flags": [7]}}, "not flags"),
        ({"matrix": {"guard": ["yes"]}}, "true or false"),
        ({"matrix": {"tp": [0]}}, "tp = 0"),
        ({"fixed": {"model": 3}}, "model = 3"),
        ({"matrix": {"lengths": [{"prompts": 3}]}}, "a table of prompt and output"),
        ({"matrix": {"lengths": [{"prompt": "9:3"}]}}, "lengths = "),
        ({"matrix": {"lengths": [{"prompt": "3:9"}], "output": [9]}}, "lengths says it already"),
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_names_the_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        _plan(**changes)


def test_windows_of_a_cell_are_computed_without_a_server() -> None:
    plan = _plan()
    assert any(key.startswith("live 3 rows 8") for key in windows_of_cell(plan.cell(0), {}))
    assert windows_of_cell(plan.cell(1), {}) == ()


class Sessions:
    """Makes sessions whose trials are clean and take a second; told of each."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.log = clock, list[str]()
        self.raises: Exception | None = None

    def __call__(self, cell: Cell, *, folder: Path, **_more: Any) -> Any:
        folder.mkdir(parents=True)
        sessions = self

        class One:
            def bound(self, deadline: Deadline) -> None:
                self.deadline = deadline

            def trial(self, seed: int) -> TrialResult:
                sessions.clock.advance(1.0)
                sessions.log.append(f"trial {cell.name}")
                if sessions.raises is not None:
                    raise sessions.raises
                return TrialResult("other" if self.deadline.expired else "clean", seed)

            def close(self) -> None:
                sessions.log.append(f"close {cell.name}")

        return One()


def _block(plan: HuntPlan, cell: int, number: int = 0) -> Block:
    return Block(number, cell, plan.cell(cell), (10 * number, 10 * number + 1), (1, 2))


def test_the_pool_keeps_a_server_for_its_cell_and_ends_it_for_another(tmp_path: Path) -> None:
    clock, plan = FakeClock(), _plan()
    made = Sessions(clock)
    pool = ServerPool(tmp_path, session=made, clock=clock)
    for number, cell in enumerate((0, 0, 1, 0)):
        assert pool.free() == 1
        pool.submit(_block(plan, cell, number))
        assert pool.free() == 0
        kinds = [message.kind for _ in range(2) for message in pool.poll(0.1)]
        assert kinds == ["result", "result", "done"]
    pool.close()
    pool.close()
    assert [line for line in made.log if line.startswith("close")] == ["close cell 0", "close cell 1", "close cell 0"]
    assert len(list(tmp_path.iterdir())) == 3, "a cell that comes again writes over nothing"


def test_a_trial_that_the_budget_cuts_off_is_no_failure_and_an_impossible_cell_is(tmp_path: Path) -> None:
    clock, plan = FakeClock(), _plan()
    made = Sessions(clock)
    pool = ServerPool(tmp_path, session=made, deadline=Deadline(1.5, clock), clock=clock)
    pool.submit(_block(plan, 0))
    first, second = pool.poll(0.1), pool.poll(0.1)
    assert [message.kind for message in first] == ["result"]
    assert [message.kind for message in second] == ["done"], "the second trial was not over when the time was"
    made.raises = ServerError("port taken")
    pool.submit(_block(plan, 1))
    pool_ = ServerPool(tmp_path, session=made, clock=clock)
    pool_.submit(_block(plan, 1))
    (message,) = pool_.poll(0.1)
    assert message.result is not None
    assert (message.result.kind, message.result.why) == ("other", "ServerError: port taken")


def test_several_workers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(_plan().document()))
    with pytest.raises(UsageError, match="--workers"):
        run_hunt(Common(out=tmp_path / "c"), HuntFlags(plan=path, workers=2))


def test_the_verb_on_the_standin(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'name = "night"\non = "server"\n[budget]\ntrials = 4\nminutes = 3\n[search]\nmode = "exhaustive"\nrepeat = 2\n'
        '[fixed]\nmodel = "dummy"\nrequests = 6\n[matrix]\nflags = ["", "--enforce-eager"]\n'
    )
    path = os.pathsep.join(part for part in (str(SITE), os.environ.get("PYTHONPATH", "")) if part)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_REPRO", "VLLM_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_repro.repro", "hunt", str(plan), "--out", str(tmp_path / "c"), "--json"],
        env={**kept, "STANDIN": "step_ms=4 wedge=3", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr[-2000:]
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema_of("hunt"))
    assert document["kinds"] == {"hang": 2, "no window": 2}
    assert document["factors"]["flags"]["--enforce-eager"] == {"no window": 2}
    logs = [len(list(folder.rglob("vllm*.log"))) for folder in sorted((tmp_path / "c" / "servers").iterdir())]
    assert sorted(logs) == [1, 2], "each hang costs its server, both other trials share one"
    assert len(list((tmp_path / "c" / "servers").rglob("diagnosis.json"))) == 2
