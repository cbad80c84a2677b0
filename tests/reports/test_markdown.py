"""Nothing from evidence becomes Markdown or HTML: checked against a real Markdown parser."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from dsv4_repro.reports.markdown import MAX_VALUE, Safe, block, cell, code, environment, prose, row, visible

_MARKDOWN = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable(["table", "strikethrough"])

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "`code` ``more``", "**bold** _em_ ~~gone~~",
    "[a](javascript:x)", "![a](http://evil/x.png)", "@everyone look", "http://evil.example www.evil.example",
    "# heading", "1. one", "- item", "+ item", "> quote", "===", "---", "| a | b |", "a | b", "&lt;b&gt; &#64;x", "\\", "```",
    "~~~", "$x$", "line\nbreak\r\n\u2028# sneaky", "\x1b[31mred\x1b[0m", "</details>", "<!-- -->", "\u202eevil", "x" * 5000,
    "_Z12persistent_topkILi512EE", "a_b_c _x_ __init__", "", " ",
]  # fmt: skip


def _inline(text: str) -> list[Token]:
    tokens = _MARKDOWN.parse(text)
    if not tokens:
        return []
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"], [token.type for token in tokens]
    return tokens[1].children or []


def _said(value: str) -> str:
    """What a reader should see: the visible text without the marks that break links and mentions."""
    return re.sub(r"\s+", " ", visible(value)).strip()


def _shown(tokens: list[Token]) -> str:
    return re.sub(r"\s+", " ", "".join(token.content for token in tokens).replace("\u200b", "")).strip()


@pytest.mark.parametrize("value", HOSTILE)
def test_prose_is_text_and_nothing_else(value: str) -> None:
    tokens = _inline(prose(value))
    assert {token.type for token in tokens} <= {"text", "text_special"}
    assert _shown(tokens) == _said(value)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("`*_[]<>|#@!&\\\n~-+=.1():/"), max_size=60))
def test_any_prose_is_text(value: str) -> None:
    tokens = _inline(prose(value))
    assert {token.type for token in tokens} <= {"text", "text_special"}
    assert _shown(tokens) == _said(value)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("`|<&\\\n "), max_size=40))
def test_any_code_span_is_one_span_with_the_text(value: str) -> None:
    tokens = _inline(code(value))
    if not visible(value).strip():
        assert tokens == []
        return
    assert [token.type for token in tokens] == ["code_inline"]
    assert tokens[0].content == visible(value)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet=st.characters() | st.sampled_from("`~\n<"), max_size=30), max_size=5))
def test_no_line_of_a_block_closes_it(lines: list[str]) -> None:
    tokens = _MARKDOWN.parse(block(lines))
    assert [token.type for token in tokens] == ["fence"]
    assert tokens[0].content.splitlines() == [visible(line) for line in lines]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("`|\\*_<"), min_size=1, max_size=30), st.text(max_size=20))
def test_a_row_keeps_its_number_of_cells(first: str, second: str) -> None:
    for cells in ([first, second], [cell(first), second]):
        tokens = _MARKDOWN.parse("| a | b |\n| --- | --- |\n" + row(cells))
        assert [token.type for token in tokens].count("td_open") == 2
        assert not any(token.type == "html_block" for token in tokens)


def test_mentions_and_bare_links_are_broken() -> None:
    assert "@everyone" not in prose("@everyone")
    assert "http://" not in prose("see HTTP://evil and http://evil").lower()
    assert "www." not in prose("www.evil.example")


def test_values_are_cut() -> None:
    assert len(visible("x" * (MAX_VALUE + 100))) == MAX_VALUE + 1


def test_templates_escape_what_they_print_and_refuse_unknown_names() -> None:
    made = environment()
    assert made.from_string("{{ a }} {{ b }}").render(a="<b>", b=Safe("<b>")) == "&lt;b&gt; <b>"
    with pytest.raises(Exception, match="undefined"):
        made.from_string("{{ missing }}").render()
