"""The figures: what they show, how links are told apart, and that size and text are bounded whatever comes in."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.records import ChainLink, Diagnosis, LedgerGroup, Verdict
from dsv4_repro.reports.svg import Drawing, fitted, nice_ticks, text_width, wrap_words
from dsv4_repro.reports.svg_chain import STATUS_WORDS, chain_svg
from dsv4_repro.reports.svg_grid import grid_picture, grid_svg
from dsv4_repro.reports.svg_timeline import numbered, timeline_svg
from dsv4_repro.reports.timeline_data import build_timeline

NS = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{NS}text")]


# --- the writer ---------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=300), st.floats(40, 900), st.sampled_from([11.0, 13.0]))
@settings(max_examples=200, deadline=None)
def test_wrapped_lines_fit_and_lose_only_what_they_say(text: str, width: float, size: float) -> None:
    lines = wrap_words(text, width, size, most=200)
    assert all(text_width(line, size) <= width + size * 2 for line in lines)
    assert "".join("".join(lines).split()) == "".join(re.sub(r"\s+", " ", _shown(text)).split())


def _shown(text: str) -> str:
    from dsv4_repro.reports.markdown import visible

    return visible(text, limit=2000)


@given(st.text(max_size=400), st.floats(20, 600))
@settings(max_examples=100, deadline=None)
def test_fitted_text_is_no_wider_than_asked(text: str, width: float) -> None:
    assert text_width(fitted(text, width, 12), 12) <= max(width, 12 * 2)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_ticks_are_few_round_and_inside(low: float, span: float, most: int) -> None:
    high = low + span
    ticks = nice_ticks(low, high, most)
    assert len(ticks) <= most + 1
    assert ticks == sorted(ticks)
    if high > low:
        assert all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in ticks)


def test_a_drawing_escapes_text_attributes_and_tips() -> None:
    drawing = Drawing(100, title='a"<b>', description="&", prefix="p")
    drawing.text(0, 0, "<script>\x00", 'x" onload="y')
    drawing.rect(0, 0, -5, 3, "c", tip="</title><script>")
    root = parsed(drawing.render(10))
    assert {element.tag for element in root.iter()} == {f"{NS}svg", f"{NS}title", f"{NS}desc", f"{NS}text", f"{NS}rect"}
    assert all("onload" not in element.attrib for element in root.iter())
    assert next(root.iter(f"{NS}rect")).get("width") == "0"


# --- the chain ----------------------------------------------------------------------------------------------------------------


def test_links_differ_in_shape_outline_and_words(made: Any) -> None:
    shapes = {}
    for status in STATUS_WORDS:
        svg = chain_svg((ChainLink(link="drain", status=status, text="x"),), 700, "p")  # type: ignore[arg-type]
        marker = [
            element.tag.removeprefix(NS) + "/" + element.get("class", "")
            for element in parsed(svg)
            if "mk" in element.get("class", "").split()
        ]
        box = next(element.get("class") for element in parsed(svg).iter(f"{NS}rect") if "box" in element.get("class", ""))
        assert any(text.startswith(status) for text in texts(svg))
        shapes[status] = ([tag.partition("/")[0] for tag in marker], box)
    kinds = [shape for shape, _ in shapes.values()]
    assert len({tuple(kind) for kind in kinds[:4]}) == 4
    assert shapes["inferred"][1] != shapes["measured"][1]


def test_the_legend_explains_only_what_is_drawn() -> None:
    svg = chain_svg((ChainLink(link="drain", status="measured", text="x"),), 700, "p")
    words = " ".join(texts(svg))
    assert "measured: read" in words
    assert "inferred" not in words


@pytest.mark.parametrize("width", [372, 920])
def test_the_chain_fits_its_width_and_any_number_of_links(width: float, made: Any) -> None:
    links = tuple(ChainLink(link=made.evil, status="inferred", text=made.evil * 20) for _ in range(500))
    svg = chain_svg(links, width, "p")
    assert len(svg) < 300_000
    assert "468 more links" in svg
    for element in parsed(svg).iter(f"{NS}text"):
        size = 13.0
        start = float(element.get("x", "0"))
        if element.get("text-anchor") != "end":
            assert start + text_width(element.text or "", size) <= width + 2 * size


def test_no_links_no_figure() -> None:
    assert chain_svg((), 700, "p") == ""


# --- the grid -----------------------------------------------------------------------------------------------------------------


def test_each_block_is_drawn_once_in_its_state(made: Any) -> None:
    picture = grid_picture(made.hang())
    assert picture is not None
    assert (picture.total, picture.ctas_per_group) == (16, 2)
    assert {state: picture.count(state) for state in ("spinning", "exited", "running", "never_started", "unlisted")} == {
        "spinning": 1,
        "exited": 15,
        "running": 0,
        "never_started": 0,
        "unlisted": 0,
    }
    svg = grid_svg(picture, 700, "p")
    paths = {element.get("class"): element.get("d", "") for element in parsed(svg).iter(f"{NS}path")}
    assert paths["cell cell-exited"].count("M") == 15
    assert [text for text in texts(svg) if text.isdigit()] == [str(number) for number in range(16)]


def test_states_differ_without_colour() -> None:
    states = {"spinning": 0, "never_started": 1, "unknown": 2, "exited": 3, "running": 4}
    group = LedgerGroup(group=0, spinning=(0,), never_started=(1,), unknown=(2,), exited=(3,), running=(4,))
    picture = grid_picture(_spun(ledger=(group,)))
    assert picture is not None
    assert [picture.codes[block] for block in states.values()] == [5, 3, 2, 1, 4]
    marked = {element.get("class") for element in parsed(grid_svg(picture, 700, "p")).iter(f"{NS}path")}
    assert {"mark mark-spinning", "mark mark-never_started", "mark mark-unknown"} <= marked


def _spun(**more: Any) -> Diagnosis:
    return Diagnosis(outcome="hang", ground="gpu", verdict=Verdict.model_validate({"class": "gpu-kernel-stuck"}), **more)


def test_without_a_ledger_only_waiting_blocks_are_claimed(made: Any) -> None:
    picture = grid_picture(_spun(waits=(made.wait(block=(1, 2, 0), grid=(4, 3, 1)),)))
    assert picture is not None
    assert not picture.from_ledger
    assert [at for at, code in enumerate(picture.codes) if code] == [9]
    assert picture.count("unlisted") == 11


def test_nothing_known_no_picture() -> None:
    assert grid_picture(_spun()) is None
    assert grid_picture(_spun(ledger=(LedgerGroup(group=0),))) is None


def test_a_grid_of_a_hundred_thousand_blocks_stays_small(made: Any) -> None:
    groups = tuple(LedgerGroup(group=g, spinning=(4 * g,), exited=(4 * g + 1, 4 * g + 2, 4 * g + 3)) for g in range(25_000))
    began = time.process_time()
    picture = grid_picture(made.hang(ledger=groups, waits=(made.wait(grid=(100_000, 1, 1)),)))
    assert picture is not None
    svg = grid_svg(picture, 920, "p")
    assert time.process_time() - began < 3
    assert len(svg) < 400_000
    assert picture.count("spinning") == 25_000
    assert "One square stands for 25 neighbouring blocks" in svg


@pytest.mark.parametrize("grid", [(2**31 - 1, 65535, 65535), (0, 1, 1), (-5, 1, 1), (1, 1, 1)])
def test_impossible_grids_do_not_hurt(made: Any, grid: tuple[int, int, int]) -> None:
    picture = grid_picture(
        made.hang(waits=(made.wait(grid=grid, block=(0, 0, 0)),), ledger=(LedgerGroup(group=0, spinning=(-1, 5, 2**40)),))
    )
    if picture is not None:
        assert len(picture.codes) <= 1 << 20
        svg = grid_svg(picture, 372, "p")
        assert len(svg) < 500_000
        assert ("Only the first" in svg) == (picture.total > len(picture.codes))


# --- the timeline -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [372, 920])
def test_every_panel_and_lane_with_data_is_drawn(made: Any, width: float) -> None:
    timeline = build_timeline(made.lines(), made.hang())
    assert timeline is not None
    words = texts(timeline_svg(timeline, width, "p"))
    for heading in (
        "Tokens generated",
        "Decode steps done",
        "Requests",
        "GPU and memory utilisation, %",
        "Power, W",
        "Watchdog",
        "Collectors",
        "Experiment",
        "Run",
    ):
        assert heading in words, heading
    assert "Log" not in words


def test_marks_keep_their_numbers_and_clusters_name_theirs(made: Any) -> None:
    timeline = build_timeline(made.lines(), made.hang())
    assert timeline is not None
    numbers = [number for number, _ in numbered(timeline)]
    assert numbers == list(range(1, len(numbers) + 1))
    labels = [text for text in texts(timeline_svg(timeline, 920, "p")) if re.fullmatch(r"\d+(?:[–…]\d+)?", text)]
    covered: set[int] = set()
    for label in labels:
        ends = [int(part) for part in re.split("[–…]", label)]
        covered |= set(range(ends[0], ends[-1] + 1))
    assert set(numbers) <= covered


def test_a_timeline_of_very_many_events_is_bounded(made: Any) -> None:
    lines = [{"t": 0.01 * n, "at": "2026-11-29T14:05:00Z", "kind": "note", "text": f"{made.evil} {n}"} for n in range(20_000)]
    lines += [{"t": 0.01 * n, "kind": "sample", "running": n % 7, f"k{n % 100}": 1} for n in range(20_000)]
    lines += [{"t": 3.0, "kind": "hung", "state": "hung", "step": 1}]
    timeline = build_timeline(lines, made.hang())
    assert timeline is not None
    assert len(timeline.marks) == 400
    assert any("events are not drawn" in note for note in timeline.notes)
    svg = timeline_svg(timeline, 920, "p")
    assert len(svg) < 300_000
    assert any(mark.level == "bad" for _, mark in numbered(timeline))
    assert len(numbered(timeline)) == 60


def test_many_gpus_name_the_lowest_and_the_highest(made: Any) -> None:
    lines = [
        {"t": float(t), "kind": "sample", "gpus": [{"index": g, "utilisation": 100 - (60 if g == 5 else g)} for g in range(8)]}
        for t in range(5)
    ]
    timeline = build_timeline(lines, made.hang())
    assert timeline is not None
    assert len(timeline.curves) == 8
    words = texts(timeline_svg(timeline, 920, "p"))
    assert "GPU (GPU 5) 40" in words
    assert "GPU (GPU 0) 100" in words
    assert "8 curves, lowest and highest named" in words
