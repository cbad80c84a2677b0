"""The page in a real browser: no complaint, no request, nothing wider than the window, readable in light, dark and on paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.records import Diagnosis, LedgerGroup, Verdict
from dsv4_repro.reports.html import ReportExtras, html_report
from dsv4_repro.reports.timeline_data import build_timeline

pytestmark = pytest.mark.browser

WIDTH = "document.documentElement.scrollWidth - innerWidth"
#: The least contrast of any visible text against its background (WCAG 2 asks for 4.5), with the text.
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = c => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const lum = c => {
    const f = c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * f[0] + .7152 * f[1] + .0722 * f[2];
  };
  const back = e => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] > 200) return c; }
    return rgb('white');
  };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || ['TITLE', 'DESC'].includes(e.tagName.toUpperCase())) continue;
    const style = getComputedStyle(e);
    if (e.namespaceURI.includes('svg') && style.paintOrder.includes('stroke') && style.strokeWidth !== '1px') continue;
    const svg = e.namespaceURI.includes('svg');
    if (svg && e.getAttribute('class').includes('t-cell')) continue;  // stands on a filled square
    const front = lum(rgb(svg ? style.fill : style.color)), behind = lum(back(e));
    const ratio = (Math.max(front, behind) + .05) / (Math.min(front, behind) + .05);
    if (ratio < worst[0]) worst = [ratio, e.textContent.trim().slice(0, 40)];
  }
  return worst;
})()"""
HIDDEN_TEXT = (
    "[...document.querySelectorAll('details:not([open])')]"
    ".map(d => [...d.children].slice(1).every(c => c.getClientRects().length > 0))"
)


def _page(made: Any, folder: Path, diagnosis: Diagnosis | None = None, **more: Any) -> Path:
    diagnosis = diagnosis or made.hang()
    extras = ReportExtras(timeline=build_timeline(made.lines(), diagnosis), threads=made.threads())
    page = folder / "report.html"
    page.write_text(html_report(made.source(diagnosis, **more), extras), encoding="utf-8")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_is_quiet_fits_and_can_be_read(browser: Any, made: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page = _page(made, tmp_path)
    seen = browser.look(page, width=width, scheme=scheme, ask=(WIDTH, CONTRAST, "getComputedStyle(document.body).backgroundColor"))
    assert seen.complaints == []
    assert seen.requests == []
    overflow, (contrast, text), background = seen.answers
    assert overflow <= 0
    assert contrast >= 4.5, text
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("width", [400, 1400])
def test_exactly_one_drawing_of_each_figure_shows(browser: Any, made: Any, tmp_path: Path, width: int) -> None:
    shown = "[...f.querySelectorAll('svg')].filter(s => s.getClientRects().length).length"
    count = f"[...document.querySelectorAll('figure')].map(f => {shown})"
    seen = browser.look(_page(made, tmp_path), width=width, ask=(count,))
    assert seen.answers == [[1, 1, 1]]


@pytest.mark.parametrize("width", [400, 1400])
def test_a_hostile_page_runs_nothing_loads_nothing_and_fits(browser: Any, made: Any, tmp_path: Path, width: int) -> None:
    evil = made.evil
    verdict = Verdict.model_validate(
        {"class": "gpu-spin-barrier", "cause": "peer-left", "sentence": evil, "identity": evil, "signature": evil}
    )
    diagnosis = made.hang(
        verdict=verdict,
        waits=(made.wait(kernel=evil, address=evil, state_field=evil, comparison=evil, instructions=((0, evil),)),),
        next=evil,
        decisive=evil,
        alternatives=[{"class": evil, "why_open": evil}],
        signatures=[{"name": evil, "standing": evil, "seen": [evil]}],
        inputs=[{"path": evil, "kinds": [evil], "note": evil, "status": evil}],
        ledger=(LedgerGroup(group=1, spinning=(1,), inferred=evil),),
        timeline={
            "axis": [evil],
            "events": [{"seconds": 1.8e9, "when": "Z", "kind": evil, "text": evil}],
            "series": {evil + " W": [[1.8e9, 3]]},
        },
    )
    run = {**made.run, "environment": {evil: evil}, "command": [evil]}
    page = _page(made, tmp_path, diagnosis, run=run, title=evil, version=evil)
    seen = browser.look(page, width=width, ask=(WIDTH, "document.scripts.length", "document.images.length", "document.title"))
    assert seen.complaints == []
    assert seen.requests == []
    assert seen.answers[0] <= 0
    assert seen.answers[1:3] == [0, 0]
    assert "<script>alert(1)</script>" in seen.answers[3]


def test_a_page_of_a_large_grid_and_of_nothing(browser: Any, made: Any, tmp_path: Path) -> None:
    groups = tuple(LedgerGroup(group=g, spinning=(4 * g,), exited=(4 * g + 1, 4 * g + 2, 4 * g + 3)) for g in range(25_000))
    large = made.hang(ledger=groups, waits=(made.wait(grid=(100_000, 1, 1)),))
    bare = Diagnosis(outcome="inconclusive", ground="file", verdict=Verdict.model_validate({"class": "unknown"}))
    for diagnosis in (large, bare):
        page = tmp_path / "page.html"
        page.write_text(html_report(made.source(diagnosis, run={}, fixes=())), encoding="utf-8")
        seen = browser.look(page, width=400, ask=(WIDTH,))
        assert (seen.complaints, seen.requests) == ([], [])
        assert seen.answers[0] <= 0


def test_on_paper_folded_parts_are_printed(browser: Any, made: Any, tmp_path: Path) -> None:
    page = _page(made, tmp_path)
    seen = browser.look(
        page,
        width=750,
        scheme="dark",
        media="print",
        ask=(HIDDEN_TEXT, CONTRAST, "getComputedStyle(document.body).backgroundColor"),
    )
    assert seen.answers[0]
    assert all(seen.answers[0])
    assert seen.answers[1][0] >= 4.5
    assert seen.answers[2] == "rgb(255, 255, 255)"


def test_the_watch_sees_what_it_must_see(browser: Any, tmp_path: Path) -> None:
    """Without this, a browser that reports nothing would pass for a page that does nothing."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><html><body><img src='http://127.0.0.1:9/x.png'><script>console.error('seen'); nosuch();</script>"
        "<p style='color:#777;background:#888;width:3000px'>low</p></body></html>"
    )
    seen = browser.look(page, width=400, ask=(WIDTH, CONTRAST))
    assert seen.requests == ["http://127.0.0.1:9/x.png"]
    assert any("seen" in text for text in seen.complaints)
    assert len(seen.complaints) >= 2
    assert seen.answers[0] > 1000
    assert seen.answers[1][0] < 4.5


def test_extras_do_not_change_the_source(made: Any) -> None:
    source = made.source()
    before = dataclasses.asdict(source)
    html_report(source, ReportExtras(threads=made.threads()))
    assert dataclasses.asdict(source) == before
