"""NCCL's RAS, the watchdog and the flight recorder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import TranscriptError
from dsv4_repro.forensics.evidence.flight_recorder import load_pickle
from dsv4_repro.forensics.evidence.gather import read_paths, read_text

SUMMARY = """NCCL version 2.29.3 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  {}

Errors
======

Warnings
========

"""
MISMATCH = """#0-0 (5c1e90d27b43aa08) MISMATCH
  Communicator ranks have different AllGather operation counts
  3 ranks have launched up to operation {a}
  1 ranks have launched up to operation {b}
  Rank 2 -- GPU 0 managed by process 7302 on node 10.0.0.12
"""


def test_ras_text_two_answers_in_one_part() -> None:
    text = SUMMARY.format("MISMATCH") + MISMATCH.format(a=7, b=6) + SUMMARY.format("MISMATCH") + MISMATCH.format(a=7, b=6)
    case = read_text("ras", text)
    assert len(case.ras) == 2
    comm = case.ras[1].comms[0]
    assert comm.groups["AllGather"] == ((3, 7), (1, 6))
    assert comm.counts["AllGather"] == {2: 6}
    assert comm.members[2] == ("10.0.0.12", 7302, "0")


def test_ras_text_forms_of_outliers_dead_and_missing() -> None:
    text = """Communicators... (2.05s)
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

#1-0 (aa264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 9
  Rank 4 has launched up to operation 8 -- GPU 4 managed by process 11 on node n1
  Rank 5 has not launched any operations -- [process information not found]

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
    (query,) = read_text("ras", text).ras
    assert query.dead_processes == (3487984,)
    assert query.timeouts == 2
    first, second = query.comms
    assert first.missing == (21,)
    assert second.counts["AllReduce"] == {4: 8, 5: 0}
    assert set(second.groups["AllReduce"]) == {(6, 9), (1, 8), (1, 0)}


def test_ras_json() -> None:
    def rank(number: int, count: int) -> dict[str, Any]:
        return {"rank": number, "host": "h", "pid": 10 + number, "cuda_dev": number, "status": {"async_error": 0},
                "collective_counts": {"AllReduce": count, "AllGather": 3}}  # fmt: skip

    document = {
        "nccl_version": "2.28.9",
        "communicators": [
            {"hash": "0xab", "size": 3, "ranks": [rank(0, 9), rank(1, 8)],
             "missing_ranks": [{"rank": 2, "pid": 12, "status": {"unresponsive": True, "considered_dead": True}}]}
        ],
    }  # fmt: skip
    (query,) = read_text("ras.json", json.dumps(document, indent=1)).ras
    (comm,) = query.comms
    assert comm.counts["AllReduce"] == {0: 9, 1: 8}
    assert set(comm.groups["AllReduce"]) == {(1, 9), (1, 8)}
    assert (comm.missing, comm.dead, query.dead_processes) == ((2,), (2,), (12,))
    assert query.errors == ("MISMATCH",)


def test_watchdog_both_spellings() -> None:
    case = read_text(
        "w",
        "[rank0]:[E1128 13:10:44.903881913 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=51377, "
        "OpType=_ALLGATHER_BASE, NumelIn=5, NumelOut=6, Timeout(ms)=600000) ran for 600037 milliseconds before timing out.\n"
        "[rank3]:[E1128 13:10:45.0 ProcessGroupNCCL.cpp:2252] [PG ID 2 PG GUID 3 Rank 3]  failure detected by watchdog at work "
        "sequence id: 51377 PG "
        "status: last enqueued work: 51377, last completed work: 51376\n"
        "[E ProcessGroupNCCL.cpp:523] [Rank 1] Timeout at NCCL work: 9, last enqueued NCCL work: 10, last completed NCCL "
        "work: 8.\n",
    )
    first, second, third = case.watchdog
    assert (first.rank, first.sequence, first.operation, first.waited_ms) == (0, 51377, "_ALLGATHER_BASE", 600037)
    assert (second.rank, second.last_enqueued, second.last_completed) == (3, 51377, 51376)
    assert (third.rank, third.last_enqueued, third.last_completed) == (1, 10, 8)


def dump(rank: int, last: str, state: str = "started") -> dict[str, Any]:
    entries = [
        {"process_group": ["0", "default_pg"], "collective_seq_id": 5, "profiling_name": "nccl:all_reduce", "state": "completed"},
        {"process_group": ["0", "default_pg"], "collective_seq_id": 6, "profiling_name": f"nccl:{last}", "state": state},
    ]
    return {
        "version": "2.10",
        "rank": rank,
        "pg_config": {},
        "pg_status": {"0": {"last_enqueued_collective": 6}},
        "entries": entries,
    }


def test_flight_recorder_json_and_pickle(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(0, "all_reduce")))
    (tmp_path / "nccl_trace_rank_1.json").write_text(json.dumps(dump(1, "all_gather")))
    case = read_paths([tmp_path])
    assert sorted((d.rank, d.entries[-1].operation, d.entries[-1].state) for d in case.flights) == [
        (0, "all_reduce", "started"),
        (1, "all_gather", "started"),
    ]
    assert all(part.kinds == ("flight recorder",) for part in case.parts)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, ("touch /tmp/dsv4-repro-was-here",)


def test_a_pickle_cannot_run_anything(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match="class"):
        load_pickle(pickle.dumps(Evil()), "evil")
    (tmp_path / "rank_0.pkl").write_bytes(pickle.dumps({"entries": [Evil()], "version": "1"}))
    case = read_paths([tmp_path])
    assert not case.flights
    assert "class" in case.parts[0].note
    assert not Path("/tmp/dsv4-repro-was-here").exists()


@pytest.mark.parametrize("data", [b"\x80\x04", b"\x80\x04.", b"\x80\x05" + b"\x8c\xff" * 50, b"\x80\x02" + bytes(range(256))])
def test_torn_pickles_are_typed(data: bytes) -> None:
    with pytest.raises(TranscriptError):
        load_pickle(data, "x")


@pytest.mark.parametrize("pack", ["json", "pickle"])
def test_a_large_dump_is_read_whole(tmp_path: Path, pack: str) -> None:
    for rank, last in ((0, "all_reduce"), (1, "all_gather")):
        document = dump(rank, last)
        filler = dict(document["entries"][0], frames=["x" * 200])
        document["entries"] = [dict(filler, collective_seq_id=-n) for n in range(20_000, 0, -1)] + document["entries"]
        data = json.dumps(document).encode() if pack == "json" else pickle.dumps(json.loads(json.dumps(document)), protocol=2)
        (tmp_path / f"fr_rank_{rank}").write_bytes(data)
        assert len(data) > 1 << 20
    case = read_paths([tmp_path])
    assert sorted((d.rank, d.entries[-1].operation) for d in case.flights) == [(0, "all_reduce"), (1, "all_gather")]
