"""The page says what the diagnosis says, escapes what strangers wrote, and holds nothing that loads or runs."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from dsv4_repro.forensics.records import ChainLink, Diagnosis, Evidence, LedgerGroup, UnreadItem, Verdict
from dsv4_repro.reports.document import FixText
from dsv4_repro.reports.html import ReportExtras, html_report
from dsv4_repro.reports.stacks_fold import HostThread
from dsv4_repro.reports.timeline_data import build_timeline

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Tree(HTMLParser):
    """Elements in order, the text, and whether every element is closed where it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page(made: Any, diagnosis: Diagnosis | None = None, threads: Any = (), lines: Any = (), **more: Any) -> str:
    diagnosis = diagnosis or made.hang()
    return html_report(made.source(diagnosis, **more), ReportExtras(timeline=build_timeline(lines, diagnosis), threads=threads))


def test_the_parts_stand_in_the_order_a_reader_needs(made: Any) -> None:
    tree = Tree(page(made, threads=made.threads(), lines=made.lines()))
    ids = [attrs["id"] for tag, attrs in tree.elements if tag == "h2"]
    assert ids == ["waits", "blocks", "experiment", "chain", "time", "why", "stacks", "read", "again", "environment", "evidence"]
    links = [attrs["href"] for tag, attrs in tree.elements if tag == "a"]
    assert {link[1:] for link in links if link} <= {str(attrs["id"]) for _, attrs in tree.elements if "id" in attrs}


def test_verdict_equation_and_instructions_are_there(made: Any) -> None:
    text = Tree(page(made)).text
    for words in (
        "Hang",
        "gpu-spin-barrier / peer-left, high confidence",
        "One block waits for a peer that left.",
        "arrival_counter 1 >= 2 is false",
        "LDG.E.STRONG.GPU R4, desc[UR16][R4.64+0xc08]",
        "▶ +0x1ce0",
        "the kernel retired 0.73 ms later",
        "vllm-51593",
        "b7e2c1904fd3",
        "kernel log",
        "run as root",
        "39 lines not understood, the first is 812",
        "nothing here reads it",
        "block 12 polls 1 and waits for 2",
        "evidence/hang-1/engine.log:3-4",
        "Nothing that was read contradicts it.",
        "clamp at 0",
        "--producer clamped",
        "200 trials: 200 hung.",
        "this run used none",
    ):
        assert words in text, words


def test_nothing_is_claimed_that_the_diagnosis_does_not_hold(made: Any) -> None:
    bare = Diagnosis(
        outcome="inconclusive", ground="file", verdict=Verdict.model_validate({"class": "unknown", "sentence": "Nothing decides."})
    )
    tree = Tree(page(made, bare, run={}, fixes=()))
    for words in (
        "What waits",
        "Blocks of the kernel",
        "chain",
        "Timeline",
        "Host stacks",
        "contradicts",
        "is false",
        "Published case",
    ):
        assert words not in tree.text, words
    assert "Inconclusive" in tree.text
    assert "No list of inputs was written" in tree.text


def test_a_wait_that_was_not_read_says_so(made: Any) -> None:
    wait = made.wait(value=None, target=None, comparison=None, instructions=(), pc_offset=None, address=None, state_field=None)
    text = Tree(page(made, made.hang(waits=(wait,)))).text
    assert "not all read" in text
    assert "is false" not in text
    assert "The instructions of this wait were not read." in text
    assert "address not known" in text


def test_waits_that_read_the_same_are_told_once(made: Any) -> None:
    waits = (*tuple(made.wait(block=(number, 0, 0)) for number in range(200)), made.wait(block=(300, 0, 0), value=0))
    tree = Tree(page(made, made.hang(waits=waits, ledger=())))
    assert sum(tag == "div" and attrs.get("class") == "wait" for tag, attrs in tree.elements) == 2
    assert "199 more blocks: 1, 2, 3" in tree.text


def test_every_value_is_escaped_wherever_it_stands(made: Any) -> None:
    evil = made.evil
    diagnosis = made.hang(
        verdict=Verdict.model_validate({"class": "gpu-spin-barrier", "sentence": evil, "identity": evil, "signature": evil}),
        waits=(made.wait(kernel=evil, address=evil, state_field=evil, comparison=evil, instructions=((0, evil),)),),
        ledger=(LedgerGroup(group=1, spinning=(1,), inferred=evil),),
        chain=(ChainLink(link=evil, status="inferred", text=evil, evidence=(evil,)),),
        evidence=(Evidence(id=evil, kind=evil, path=evil, sha256=evil),),
        unread=(UnreadItem(what=evil, why=evil, remedy=evil),),
        next=evil,
        decisive=evil,
        contradicting=[{"text": evil, "lines": [{"source": evil, "first": 1, "text": evil, "place": evil}]}],
        alternatives=[{"class": evil, "cause": evil, "why_open": evil, "decided_by": evil}],
        signatures=[
            {"name": evil, "standing": evil, "sentence": evil, "workaround": evil},
            {"name": evil, "standing": "match", "workaround": evil},
        ],
        inputs=[{"path": evil, "heading": evil, "kinds": [evil], "status": evil, "note": evil}],
        unwedge={"attempted": True, "retired": False, "milliseconds": None, "address": evil, "why_not": evil},
        timeline={"axis": [evil], "events": [{"seconds": 1.8e9, "when": "Z", "kind": evil, "text": evil, "source": evil}]},
    )
    threads = [HostThread((evil, evil), evil, evil, state=evil, waits=evil), HostThread((evil, "x"), evil, evil, waits=evil)]
    lines = [
        {"t": 1.0, "at": evil, "kind": evil, "text": evil},
        {"t": 2, "kind": "capture", "collector": evil, "seconds": 1, "disturbance": evil},
    ]
    run = {
        "environment": {evil: evil},
        "command": [evil],
        "versions": {evil: evil},
        "kernel": {"origin": evil, "function": evil, "sha256": evil},
    }
    text = page(
        made, diagnosis, threads, lines, run=run, title=evil, version=evil, fixes=[FixText(evil, evil, evil, evil)], targets=[evil]
    )
    tree = Tree(text)
    assert tree.open == []
    tags = {tag for tag, _ in tree.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "base", "form", "foreignobject"}
    assert sum(tag == "style" for tag, _ in tree.elements) == 1
    handlers = [name for _, attrs in tree.elements for name in attrs if name.startswith("on")]
    assert handlers == []
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "{{7*7}}" in tree.text
    assert "49" not in re.findall(r"\b49\b", tree.text)


def test_the_page_loads_nothing_and_its_policy_names_its_style(made: Any) -> None:
    text = page(made, threads=made.threads(), lines=made.lines())
    tree = Tree(text)
    for tag, attrs in tree.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
            value = attrs.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, value)
    assert "url(" not in text
    assert "@import" not in text
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(str(attrs["content"]) for tag, attrs in tree.elements if attrs.get("http-equiv") == "Content-Security-Policy")
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not any("style" in attrs for _, attrs in tree.elements)


@pytest.mark.parametrize("outcome", ["hang", "clean", "other", "inconclusive"])
def test_the_outcome_is_said_in_words_and_by_a_sign(made: Any, outcome: Any) -> None:
    classes = {"hang": "gpu-kernel-stuck", "clean": "not-hung", "other": "worker-dead", "inconclusive": "unknown"}
    diagnosis = Diagnosis(outcome=outcome, ground="file", verdict=Verdict.model_validate({"class": classes[outcome]}))
    text = Tree(page(made, diagnosis)).text
    words, sign = {
        "hang": ("Hang", "✕"),
        "clean": ("Not hung", "✓"),
        "other": ("Another failure", "!"),
        "inconclusive": ("Inconclusive", "?"),
    }[outcome]
    assert f"{sign} {words}" in text


def test_the_page_is_the_same_every_time(made: Any) -> None:
    assert page(made, threads=made.threads(), lines=made.lines()) == page(made, threads=made.threads(), lines=made.lines())


def test_a_rank_that_stands_elsewhere_is_shown(made: Any) -> None:
    text = Tree(page(made, threads=made.threads())).text
    assert "ranks 0-1, 3 MainThread" in text
    assert "rank 2 MainThread stands elsewhere" in text
    assert "ranks 0-3 WorkerAsyncOutputCopy" in text


@pytest.mark.parametrize(
    ("ground", "words", "never"), [("gpu", "GPU 0", "interpreted device"), ("cpu", "interpreted device", "GPU 0")]
)
def test_a_wait_on_the_interpreted_device_is_not_said_to_be_on_a_gpu(made: Any, ground: Any, words: str, never: str) -> None:
    shown = page(made, made.hang(ground=ground))
    assert f"<dt>Where</dt><dd>{words}</dd>" in shown
    assert f"<dt>Where</dt><dd>{never}" not in shown
