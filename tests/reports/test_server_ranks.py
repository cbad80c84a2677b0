"""A server of several ranks in every form of the report: a row a rank, the ledger by rank, one picture of one launch."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.reports.document import ReportSource, inferred_lines, ledger_rows, markdown_report, output_words, rank_rows
from dsv4_repro.reports.html import html_report
from dsv4_repro.reports.svg_grid import grid_picture
from dsv4_repro.repro.narrate import autopsy_lines


def wait(rank: int | None, **more: Any) -> dict[str, Any]:
    return {
        "kernel": "persistent_topk_kernel", "grid": [16, 1, 1], "block": [12, 0, 0], "value": 1, "target": 2, "comparison": ">=",
        "state_field": "arrival_counter", "group": 6, "role": "leader", "rank": rank, "device": rank, **more,
    }  # fmt: skip


def group(number: int, rank: int | None, *, spinning: list[int], exited: list[int]) -> dict[str, Any]:
    rest = {"rank": rank} if rank is not None else {}
    return {"group": number, "spinning": spinning, "exited": exited, "inferred": "exited: peers leave early", **rest}


def row(rank: int | None, role: str = "held", **more: Any) -> dict[str, Any]:
    return {"rank": rank, "pid": 816 + (rank or 0), "gpu_index": rank, "role": role, "class": "gpu-spin-barrier",
            "cause": "peer-left", "identity": "abcdef012345", **more}  # fmt: skip


def diagnosis(**more: Any) -> Diagnosis:
    document = {
        "outcome": "hang", "ground": "server",
        "verdict": {"class": "gpu-spin-barrier", "cause": "peer-left", "confidence": "high", "sentence": "ranks 0, 1: …"},
        "waits": [wait(0), wait(1, block=[4, 0, 0], group=2)],
        "ledger": [group(6, 0, spinning=[12], exited=[13]), group(2, 1, spinning=[4], exited=[5])],
        "ranks": [row(0), row(1, "waits for a peer", cause=None, identity=None)],
        "output_rank": {"rank": 0, "why": "the engine takes each step's output from rank 0 alone"},
        **more,
    }  # fmt: skip
    return Diagnosis.model_validate(document)


def test_each_rank_has_a_row_and_the_one_that_replies_is_said() -> None:
    found = diagnosis()
    assert rank_rows(found) == [
        ("0", "816", "0", "held", "gpu-spin-barrier / peer-left", "abcdef012345"),
        ("1", "817", "1", "waits for a peer", "gpu-spin-barrier", "-"),
    ]
    assert output_words(found).startswith("Rank 0 replies to the engine: the engine takes")
    text = "\n".join(markdown_report(ReportSource(found)))
    assert "## The ranks" in text
    assert "| 1 | 817 | 1 | waits for a peer |" in text
    assert "Rank 0 replies to the engine" in text
    page = html_report(ReportSource(found))
    assert '<h2 id="ranks">' in page
    assert "waits for a peer" in page
    said = "\n".join(autopsy_lines(found))
    assert "rank 1 (process 817, GPU 1) waits for a peer: gpu-spin-barrier" in " ".join(said.split())
    assert "Rank 0 replies to the engine" in said


def test_the_ledger_names_the_rank_and_the_picture_shows_one_launch() -> None:
    found = diagnosis()
    assert [cells[0] for cells in ledger_rows(found.ledger)] == ["2 (rank 1)", "6 (rank 0)"]
    picture = grid_picture(found)
    assert picture is not None
    assert (picture.groups, picture.count("spinning"), picture.count("exited"), picture.other_kernels) == (1, 1, 1, 1)
    same = diagnosis(ledger=[group(6, 0, spinning=[12], exited=[13]), group(6, 1, spinning=[12], exited=[13])])
    assert inferred_lines(same.ledger) == ["group 6: exited: peers leave early"]


def test_without_ranks_the_report_is_as_it_was() -> None:
    found = diagnosis(ranks=[], output_rank=None, ledger=[group(6, None, spinning=[12], exited=[13])], waits=[wait(None)])
    assert rank_rows(found) == []
    assert output_words(found) == ""
    assert "The ranks" not in "\n".join(markdown_report(ReportSource(found)))
    assert 'id="ranks"' not in html_report(ReportSource(found))
    assert ledger_rows(found.ledger)[0][0] == "6"


@pytest.mark.parametrize("ranks", ["held", 7, [1, "x", None], [{"rank": 0}], [{"role": "<b>|`"}], {"role": "held"}])
def test_a_document_of_somebody_else_s_making(ranks: Any) -> None:
    found = diagnosis(ranks=ranks, output_rank={"rank": "0"})
    assert len(rank_rows(found)) <= 1
    assert output_words(found) == ""
    assert "<b>|" not in html_report(ReportSource(found))
    assert not any("<b>|" in line for line in markdown_report(ReportSource(found)))
    assert autopsy_lines(found)
