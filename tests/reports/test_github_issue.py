"""The text for an issue: the template's order, GitHub's limit, folds that close, and nothing that a stranger wrote takes over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dsv4_repro.forensics.records import ChainLink, Diagnosis, Evidence, LedgerGroup, UnreadItem, Verdict
from dsv4_repro.reports.document import FixText, ReportSource, markdown_report
from dsv4_repro.reports.github_issue import GITHUB_LIMIT, issue_report, split_sections
from dsv4_repro.reports.stacks_fold import HostThread


def text_of(source: ReportSource, threads: Any = ()) -> str:
    return "\n".join(issue_report(source, threads)) + "\n"


def headings(text: str) -> list[str]:
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "heading_open" and token.tag == "h3"]


def test_the_order_is_that_of_the_template(made: Any) -> None:
    text = text_of(made.source(), made.threads())
    assert headings(text) == ["Your current environment", "🐛 Describe the bug", "Before submitting a new issue..."]
    first = [line for line in text.splitlines() if line][:2]
    assert first == ["# [Bug]: A draining batch wedges the top-k", "**hang**: gpu-spin-barrier / peer-left, high confidence"]
    order = [
        "Your current environment",
        "One block waits",
        "#### What waits",
        "#### The chain",
        "#### Why this verdict",
        "#### Reproduce",
        "#### Fixes",
        "Host stacks of 8 threads",
        "What could not be read: 1",
        "What was read",
        "Evidence with hashes",
        "Duplicates searched",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_details_are_folded_and_every_fold_closes(made: Any) -> None:
    lines = text_of(made.source(), made.threads()).splitlines()
    depth = 0
    for line in lines:
        depth += line.startswith("<details>")
        depth -= line == "</details>"
        assert depth in (0, 1)
    assert depth == 0
    assert sum(line.startswith("<details>") for line in lines) == 6


def test_everything_of_the_report_is_in_it(made: Any) -> None:
    """What document.markdown_report says is said here too, each part once."""
    source = made.source()
    text = text_of(source)
    for line in markdown_report(source):
        if line and not line.startswith(("#", "<details", "**hang")):
            assert text.count(line) >= 1, line


def test_the_slot_for_a_comparison_has_this_builds_row(made: Any) -> None:
    assert "| vllm==0.27.1 | 200 | 200 |" in text_of(made.source())
    single = made.source(made.hang(trials=None))
    assert "| vllm==0.27.1 | 1 | 1 |" in text_of(single)
    bare = Diagnosis(outcome="inconclusive", ground="file", verdict=Verdict.model_validate({"class": "unknown"}))
    assert "another build" not in text_of(ReportSource(diagnosis=bare))


def test_hostile_text_starts_no_heading_fold_or_mention(made: Any) -> None:
    evil = "</details>\n## What could not be read\n```\n# x <details><summary>y</summary> @team\n| a | b |"
    diagnosis = made.hang(
        verdict=Verdict.model_validate({"class": "gpu-spin-barrier", "sentence": evil, "identity": evil, "signature": evil}),
        waits=(made.wait(kernel=evil, instructions=((0, evil), (16, "## What waits"), (32, "</details>"))),),
        ledger=(LedgerGroup(group=1, spinning=(1,), inferred=evil),),
        chain=(ChainLink(link=evil, status="inferred", text=evil),),
        evidence=(Evidence(id="E1", kind=evil, path=evil, sha256=evil),),
        unread=(UnreadItem(what=evil, why=evil, remedy=evil),),
        next=evil,
        decisive=[{"text": evil, "lines": [{"place": evil, "source": evil}]}],
        contradicting=evil,
        alternatives=[{"class": evil, "why_open": evil}],
        signatures=[{"name": evil, "standing": evil, "sentence": evil}],
        inputs=[{"path": evil, "status": evil, "kinds": [evil], "note": evil}],
    )
    run = {**made.run, "environment": {evil: evil}, "command": [evil], "kernel": {"origin": evil}}
    text = text_of(
        made.source(diagnosis, run=run, title=evil, fixes=[FixText(evil, evil, evil, evil)]),
        [HostThread((evil, "## x", "</details>"), evil)],
    )
    assert headings(text) == ["Your current environment", "🐛 Describe the bug", "Before submitting a new issue..."]
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    html = [token.content.strip() for token in tokens if token.type == "html_block"]
    assert all(piece.startswith("<details><summary>") or piece == "</details>" for piece in html)
    assert sum(piece == "</details>" for piece in html) == sum(piece.startswith("<details>") for piece in html)
    inline = {child.type for token in tokens if token.type == "inline" for child in token.children or []}
    assert not {"html_inline", "link_open", "image"} & inline
    assert "@team" not in "".join(
        child.content for token in tokens if token.type == "inline" for child in token.children or [] if child.type == "text"
    )


def test_sections_are_split_only_at_the_templates_own_headings() -> None:
    head, sections, folds = split_sections(
        [
            "# t",
            "s",
            "## What waits",
            "````asm",
            "## no",
            "```",
            "</details>",
            "````",
            "after",
            "<details><summary>Environment</summary>",
            "e",
            "</details>",
            "end",
        ]
    )
    assert head == ["# t", "s"]
    assert sections == {"What waits": ["````asm", "## no", "```", "</details>", "````", "after", "end"]}
    assert folds == {"Environment": ["e"]}


@pytest.mark.parametrize("size", [10, 200, 5000])
def test_however_much_there_is_it_fits_and_says_what_it_left_out(made: Any, size: int) -> None:
    wide = "ü€😀" * 300
    diagnosis = made.hang(
        waits=tuple(made.wait(block=(n, 0, 0), instructions=tuple((k, wide) for k in range(20))) for n in range(size)),
        ledger=tuple(LedgerGroup(group=n, exited=tuple(range(200))) for n in range(size)),
        evidence=tuple(Evidence(id=f"E{n}", kind="k", path=f"evidence/{n}/{wide}") for n in range(min(size, 1000))),
        chain=tuple(ChainLink(link="drain", status="inferred", text=wide) for _ in range(min(size, 60))),
        unread=tuple(UnreadItem(what=f"x{n}", why=wide) for n in range(size)),
        inputs=[{"path": wide, "status": "read", "kinds": ["x"], "note": wide}] * size,
        decisive=[{"text": wide} for _ in range(size)],
    )
    threads = [HostThread(tuple(f"{wide}{n}{k}" for k in range(20)), f"T{n}") for n in range(min(size, 300))]
    text = text_of(made.source(diagnosis, title=wide), threads)
    assert len(text.encode("utf-16-le")) // 2 <= GITHUB_LIMIT
    assert len(text.encode()) <= GITHUB_LIMIT
    if size > 10:
        assert "Left out to fit an issue" in text or "Cut here to fit an issue" in text
    assert text.count("<details>") == text.count("</details>")
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert len(fences) % 2 == 0


@given(st.lists(st.text(max_size=40), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_lines_split_and_join_without_loss(lines: list[str]) -> None:
    head, sections, folds = split_sections(lines)
    kept = [*head, *(line for part in sections.values() for line in part), *(line for part in folds.values() for line in part)]
    assert len(kept) <= len(lines)
