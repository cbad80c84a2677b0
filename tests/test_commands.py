"""Every command that the program or its documents tell somebody to paste names a verb and flags that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_COMMAND = re.compile(r"dsv4-repro ([a-z]+)((?: [^\s`'\"·,;)#|]+)*)")
#: Words that follow the program's name in a sentence, and are no verb.
_PROSE = frozenset({"interpreter", "is", "version", "writer"})


@cache
def _flags() -> dict[str, frozenset[str]]:
    """Verb, or ``run SCENARIO``, -> its flags."""
    from dsv4_repro.repro.cli import build

    found: dict[str, frozenset[str]] = {}
    for name, command in build().commands.items():
        inner = getattr(command, "commands", {})
        for sub, leaf in inner.items():
            found[f"{name} {sub}"] = _options(leaf)
        found[name] = frozenset().union(*(_options(leaf) for leaf in inner.values())) if inner else _options(command)
    return found


@cache
def _scenarios() -> frozenset[str]:
    from dsv4_repro.scenarios.registry import all_scenarios

    return frozenset(entry.name for entry in all_scenarios())


def _options(command: object) -> frozenset[str]:
    names = [text for parameter in getattr(command, "params", ()) for text in (*parameter.opts, *parameter.secondary_opts)]
    return frozenset({*names, "--help", "-h"})


def _literals(path: Path) -> Iterator[str]:
    """The text of every string of a module; what an f-string fills in becomes a plain word."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _sources() -> list[Path]:
    packages = ("repro", "forensics", "kernels", "scenarios", "reports")
    agent = ROOT / "repro" / "agent"  # a distribution of its own, with its own command line
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py") if not path.is_relative_to(agent))


def _documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def _wrong(text: str) -> list[str]:
    wrong = []
    for verb, rest in _COMMAND.findall(text):
        if verb in _PROSE:
            continue
        if verb not in _flags():
            wrong.append(f"no verb {verb!r}: {verb}{rest}")
            continue
        rest = rest.partition(" -- ")[0]  # what stands after it is vLLM's
        words = rest.split()
        if verb in ("run", "show") and words and re.fullmatch(r"[a-z][a-z-]*", words[0]) and words[0] not in _scenarios():
            wrong.append(f"no scenario {words[0]!r}: {verb}{rest}")
        known = _flags().get(f"{verb} {words[0]}", _flags()[verb]) if words else _flags()[verb]
        wrong += [f"no flag {flag}: {verb}{rest}" for flag in re.findall(r"(?<=\s)(--[a-z][a-z-]*)", rest) if flag not in known]
    return wrong


@pytest.mark.parametrize("path", [*_sources(), *_documents()], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_to_paste_exist(path: Path) -> None:
    texts = _literals(path) if path.suffix == ".py" else [path.read_text(encoding="utf-8")]
    assert [problem for text in texts for problem in _wrong(text)] == []


def test_the_check_finds_a_verb_and_a_flag_that_do_not_exist() -> None:
    assert _wrong("next: dsv4-repro explain FILE") == ["no verb 'explain': explain FILE"]
    assert _wrong("`dsv4-repro run drain --on cpu --frobnicate`") == ["no flag --frobnicate: run drain --on cpu --frobnicate"]
    assert _wrong("dsv4-repro show a-thing") == ["no scenario 'a-thing': show a-thing"]
    assert _wrong("dsv4-repro audit installed    # why this one") == []


def _links(path: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    outside = ("http:", "https:", "#", "mailto:")
    return [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(outside)]


@pytest.mark.parametrize("path", _documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_the_documents_lead_somewhere(path: Path) -> None:
    assert [link for link in _links(path) if not (path.parent / link).exists()] == []


def test_every_verb_is_in_the_documents_and_in_the_map() -> None:
    """Shown as a command in docs/, and named in the map with the module that registers it."""
    shown = "\n".join(path.read_text(encoding="utf-8") for path in _documents() if path.parent.name == "docs")
    here = (ROOT / "docs" / "whats-here.md").read_text(encoding="utf-8")
    verbs = [name for name in _flags() if " " not in name]
    assert [verb for verb in verbs if f"dsv4-repro {verb}" not in shown] == []
    assert [verb for verb in verbs if not re.search(rf"\b{verb}\b", here)] == []


def test_the_benchmarks_page_lists_every_benchmark() -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.]+\.(?:py|md|json))`", page))
    assert {path.name for path in folder.glob("*.py")} - named == set()


def test_every_document_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".md" or not path.is_file():
            continue
        seen.add(path)
        waiting += [(path.parent / link).resolve() for link in _links(path)]
        waiting += [ROOT / name for name in re.findall(r"`(docs/[\w-]+\.md)`", path.read_text(encoding="utf-8"))]
    assert set(_documents()) - {path for path in _documents() if path.parent.name == "benchmarks"} - seen == set()
