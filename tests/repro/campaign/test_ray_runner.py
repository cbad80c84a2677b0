"""Blocks as Ray tasks, on a real local cluster of several nodes; a node is killed in the middle. Skipped where Ray is not
installed.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.repro.campaign.hunt import Hunt, Progress
from dsv4_repro.repro.campaign.plan import HuntPlan
from dsv4_repro.repro.campaign.sampler import Sampler
from dsv4_repro.repro.campaign.store import CampaignStore

ray = pytest.importorskip("ray", reason="Ray is not installed (extra: hunt)")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(280)]

PLAN: dict[str, Any] = {
    "name": "ray",
    "budget": {"trials": 24},
    "search": {"mode": "exhaustive", "repeat": 12},
    "matrix": {"kernel": ["builtin", "builtin:guard"]},
    "fixed": {"layers": 1},
    "minimise": False,
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that runs no task, and two nodes of one slot each: real processes of Ray, all on this machine."""
    from ray.cluster_utils import Cluster

    package = Path(__import__("dsv4_repro").__path__[0]).absolute().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
        made.second = [made.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
        yield made
        ray.shutdown()
        made.shutdown()


def test_a_node_killed_in_the_middle_loses_and_doubles_nothing(cluster: Any, tmp_path: Path) -> None:
    from dsv4_repro.repro.campaign.ray_runner import RayPool

    plan = HuntPlan.from_document(PLAN)
    pool = RayPool(cluster.address, limit_s=60.0)
    assert pool.slots() == 2
    killed: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.trials >= 4 and not killed:
            killed.append(progress.trials)
            cluster.remove_node(cluster.second[1], allow_graceful=False)

    with CampaignStore.create(tmp_path / "c", plan) as store:
        hunt = Hunt(plan, store, pool, Sampler(plan, batch=2), watch=watch)
        try:
            assert hunt.run() == "trials"
        finally:
            pool.close()
        summary = store.summary()
        lost = store.events("worker lost")
    assert killed, "the node was killed while trials were still to be made"
    assert killed[0] < 24
    assert summary.trials == 24
    assert summary.factors["kernel"] == {"builtin": {"hang": 12}, "builtin:guard": {"clean": 12}}
    numbers = [row[0] for row in sqlite3.connect(tmp_path / "c" / "campaign.sqlite").execute("SELECT number FROM trials")]
    assert sorted(numbers) == list(range(24)), "every trial once"
    workers = {row[0] for row in sqlite3.connect(tmp_path / "c" / "campaign.sqlite").execute("SELECT worker FROM trials")}
    assert len({worker.split("/")[0] for worker in workers}) == 2, "both nodes worked"
    assert all(kind == "worker lost" for _at, kind, _detail in lost)


def test_a_driver_that_is_restarted_goes_on(cluster: Any, tmp_path: Path) -> None:
    from dsv4_repro.repro.campaign.ray_runner import RayPool

    small = HuntPlan.from_document({**PLAN, "budget": {"trials": 7}})
    with CampaignStore.create(tmp_path / "c", small) as store:
        pool = RayPool(cluster.address)
        Hunt(small, store, pool, Sampler(small, batch=2)).run()
        pool.close()
    assert not ray.is_initialized(), "the pool ended the connection that it made"
    plan = HuntPlan.from_document(PLAN)
    with CampaignStore.resume(tmp_path / "c", plan) as store:
        pool = RayPool(cluster.address)
        assert Hunt(plan, store, pool, Sampler(plan, batch=2)).run() == "trials"
        pool.close()
        assert store.summary().trials == 24
        assert store.done_numbers() == (24, [])
