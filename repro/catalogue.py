"""The verbs ``list`` and ``show``: the scenarios, and where each can run on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..scenarios.registry import Scenario, all_scenarios, scenario
from .atomic import keep_document
from .console import Screen, wrap

if TYPE_CHECKING:
    from .options import Common

__all__ = ["LIST_SCHEMA", "SHOW_SCHEMA", "list_document", "list_lines", "run_list", "run_show", "show_lines"]

LIST_SCHEMA = "dsv4-repro/list/1"
SHOW_SCHEMA = "dsv4-repro/show/1"


def _entry(item: Scenario, here: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": item.name,
        "title": item.title,
        "class": item.class_,
        "cause": item.cause,
        "signature": item.signature,
        "upstream": list(item.upstream),
        "here": {ground: here[ground] for ground in item.grounds},
        "rows": [row.name for row in item.variants()],
        "rows_on": {
            ground: names for ground in ("cpu", "gpu") if (names := [row.name for row in item.variants() if ground in row.grounds])
        },
        "not_reproduced": [what for what, _ in item.not_reproduced],
    }


def list_document(scenarios: Sequence[Scenario], here: Mapping[str, str]) -> dict[str, Any]:
    """The document of ``list --json``. ``here``: ground -> "yes" or why not."""
    return {"schema": LIST_SCHEMA, "outcome": "clean", "scenarios": [_entry(item, here) for item in scenarios]}


def list_lines(scenarios: Sequence[Scenario], here: Mapping[str, str]) -> list[str]:
    """One paragraph a scenario."""
    lines: list[str] = []
    for item in scenarios:
        lines += wrap(f"{item.name:<16}{item.title}", indent=" " * 16)
        said = []
        for ground in item.grounds:
            count = sum(ground in row.grounds for row in item.variants())
            said.append(f"{ground}: {here[ground]}" + (f" ({count} row{'s' * (count > 1)})" if count else ""))
        grounds = "; ".join(said) or "not reproduced"
        lines += wrap(f"{'':16}{item.class_}/{item.cause or '-'} · here: {grounds}", indent=" " * 16)
    return lines


def show_lines(item: Scenario, here: Mapping[str, str]) -> list[str]:
    """All about one scenario."""
    lines = [item.title, ""]
    lines += [f"class {item.class_}, cause {item.cause or '-'}, signature {item.signature or '-'}"]
    lines += [f"upstream: {', '.join(item.upstream) or '-'}", ""]
    for number, paragraph in enumerate(item.story, 1):
        lines += wrap(f"{number}. {paragraph}", indent="   ")
    lines.append("")
    for fix in item.fixes:
        shown = f" Here: {' '.join(fix.flags)}" if fix.flags else ""
        lines += wrap(f"fix ({fix.layer}): {fix.text}. {fix.upstream}.{shown}", indent="  ")
    for note in item.notes:
        lines += wrap(note)
    lines.append("")
    for ground, expected in item.grounds.items():
        lines += wrap(f"--on {ground}: {expected} (here: {here[ground]})", indent="  ")
    if item.variants():
        lines.append("")
    for row in item.variants():
        expected = f"{row.class_}/{row.cause or '-'}"
        role = "fix or control" if row.fixed else "defect"
        lines += wrap(f"row {row.name} ({role}, {' and '.join(row.grounds)}, {row.kernel}): {row.text}: {expected}", indent="  ")
    for text in item.distinguishes:
        lines += wrap(f"told apart by: {text}", indent="  ")
    for what, takes in item.not_reproduced:
        lines += wrap(f"not reproduced: {what}. It would take: {takes}", indent="  ")
    if item.example and not item.example.startswith("dsv4-repro show "):
        lines += ["", f"Try: {item.example}"]
    return lines


def _here() -> dict[str, str]:
    from .grounds import grounds_here
    from .machine import probe_machine

    return grounds_here(probe_machine(version=lambda _argv: None))


def run_list(common: Common) -> int:
    """The verb ``list``: 0."""
    screen = Screen(as_json=common.as_json)
    here, scenarios = _here(), all_scenarios()
    screen.say(*list_lines(scenarios, here))
    document = list_document(scenarios, here)
    keep_document(common.out, "list", document)
    screen.document(document)
    return 0


def run_show(name: str, common: Common) -> int:
    """The verb ``show NAME``: 0; UsageError for an unknown name."""
    screen = Screen(as_json=common.as_json)
    item, here = scenario(name), _here()
    screen.say(*show_lines(item, here))
    facts = {("class" if key == "class_" else key): value for key, value in asdict(item).items()}
    document: dict[str, Any] = {"schema": SHOW_SCHEMA, "outcome": "clean", "scenario": facts, "here": here}
    if name == "drain":
        from ..scenarios.drain import schema

        document["plan_schema"] = schema()
        if not common.as_json:
            screen.say("", *_plan_lines(document["plan_schema"]))
    keep_document(common.out, "show", document)
    screen.document(document)
    return 0


def _plan_lines(schema: Mapping[str, Any]) -> list[str]:
    from ..kernels.graphs import default_capture_sizes
    from ..scenarios.drain import DEFAULT_LAYERS, DrainPlan

    lines = ["The plan's fields (a flag each, or --plan FILE):"]
    plan = DrainPlan()
    # Defaults that depend on other fields or on the ground: in the schema they are null.
    made = {
        "capture_sizes": ",".join(map(str, default_capture_sizes(plan.max_num_seqs, plan.next_n))),
        "layers": " or ".join(map(str, sorted(set(DEFAULT_LAYERS.values())))),
    }
    for field, facts in schema["properties"].items():
        if field != "schema":
            lines += wrap(
                f"  {field:<15}{made.get(field, facts.get('default'))!s:<12} {facts.get('description', '')}", indent=" " * 30
            )
    return lines
