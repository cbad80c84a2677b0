"""From any mixture of evidence to the diagnosis document: read, judge, compare with known cases, write down what was used.

``autopsy_paths`` is what the command line calls. The document carries, beside its published keys: ``decisive`` and
``contradicting`` (rules with their lines), ``alternatives``, ``signatures``, ``inputs`` (every part, also what nobody understood),
``timeline`` (events and series on one axis, with the assumptions), ``rules`` (every rule's answer).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .classify import Classification, classify
from .evidence.archive import Budget
from .evidence.casefile import CaseFile, InputPart
from .evidence.facts import DeviceFacts, SchedulerDump
from .evidence.gather import part_table, read_paths
from .evidence.refs import Ref
from .evidence.scheduler_dump import PaddingForecast, forecast_padding
from .evidence.timeline import TimelineEvent, timeline
from .records import (
    CLASSES,
    ChainLink,
    Confidence,
    Diagnosis,
    Evidence,
    LedgerGroup,
    UnreadItem,
    Verdict,
    Wait,
    Window,
    outcome_of,
    weaker_parent,
)
from .rules.base import Finding
from .rules.device import full_judgements, resident_judgements
from .rules.view import View
from .signature import Match, match_signatures

__all__ = ["AutopsyResult", "Ground", "autopsy_case", "autopsy_paths"]

Ground = Literal["server", "gpu", "cpu", "process", "file"]


@dataclass(frozen=True)
class AutopsyResult:
    """``inputs``: every part that was given, also the unread and unrecognised. ``timeline``: events in order of time."""

    diagnosis: Diagnosis
    inputs: tuple[InputPart, ...]
    timeline: tuple[TimelineEvent, ...]
    classification: Classification
    matches: tuple[Match, ...]


def autopsy_paths(paths: Sequence[Path], *, ground: Ground = "file", budget: Budget | None = None) -> AutopsyResult:
    """Judge files, folders and archives together. UsageError for a path that is not there; nothing else that the evidence holds
    raises: what cannot be read is in ``unread`` and in ``inputs``."""
    return autopsy_case(read_paths(paths, budget), ground=ground)


def autopsy_case(case: CaseFile, *, ground: Ground = "file") -> AutopsyResult:
    """Judge what was read."""
    view = View(case)
    result = classify(case, view)
    forecast = _forecast(case)
    matches = match_signatures(view, result.class_, result.cause, forecast[1] if forecast else None)
    ids = _EvidenceIds(case)
    moments = timeline(view)
    document = _Document(case, view, result, matches, forecast, ids, ground)
    diagnosis = Diagnosis.model_validate(document.build(moments))
    return AutopsyResult(diagnosis, tuple(case.parts), moments.events, result, matches)


def _forecast(case: CaseFile) -> tuple[SchedulerDump, PaddingForecast] | None:
    """The last dumped step whose padding can be predicted."""
    stated = [f.version for f in case.versions if f.package == "cudagraph_capture_sizes"]
    sizes = [int(part) for part in stated[-1].split(",") if part.strip().isdigit()] if stated else None
    eager = any(f.package == "enforce_eager" and f.version not in ("False", "") for f in case.versions)
    if eager:
        return None
    for dump in reversed(case.dumps):
        found = forecast_padding(dump, sizes or None)
        if found is not None:
            return dump, found
    return None


class _EvidenceIds:
    """Ids of the parts that held something, and the id of a citation."""

    def __init__(self, case: CaseFile) -> None:
        self.records: list[Evidence] = []
        self._by_source: dict[str, list[tuple[InputPart, str]]] = {}
        for part in case.parts:
            if not part.kinds:
                continue
            name = f"e{len(self.records) + 1}"
            interpreted = any(d.ref.source == part.path and d.origin == "interpreted" for d in case.devices)
            measured = "GPU core dump" in part.kinds
            origin = "interpreted" if interpreted else "measured" if measured else "reported"
            self.records.append(
                Evidence.model_validate(
                    {"id": name, "kind": part.kinds[0], "path": part.path, "sha256": part.sha256, "origin": origin,
                        "heading": part.heading,
                     "kinds": list(part.kinds)}
                )
            )  # fmt: skip
            self._by_source.setdefault(part.path, []).append((part, name))
        self._spans = _spans(case)

    def of(self, ref: Ref) -> str | None:
        entries = self._by_source.get(ref.source, [])
        if len(entries) == 1:
            return entries[0][1]
        for part, name in entries:
            first, last = self._spans.get(id(part), (0, -1))
            if ref.unit == "line" and first <= ref.first <= last:
                return name
        return entries[0][1] if entries else None

    def of_all(self, refs: Sequence[Ref]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for ref in refs if (name := self.of(ref)) is not None))


def _spans(case: CaseFile) -> dict[int, tuple[int, int]]:
    """Line spans of the parts of each source: a part begins where the one before it ended."""
    spans: dict[int, tuple[int, int]] = {}
    ends: dict[str, int] = {}
    for part in case.parts:
        start = ends.get(part.path, 0) + 1
        last = start + part.lines + (1 if part.heading else 0) - 1
        spans[id(part)] = (start, last)
        ends[part.path] = last
    return spans


def _cite(ref: Ref, ids: _EvidenceIds) -> dict[str, Any]:
    return {
        "evidence": ids.of(ref),
        "source": ref.source,
        "first": ref.first,
        "last": ref.last,
        "unit": ref.unit,
        "text": ref.text,
        "place": ref.place(),
    }


def _finding(finding: Finding, ids: _EvidenceIds) -> dict[str, Any]:
    return {
        "rule": finding.rule, "class": finding.class_, "cause": finding.cause, "answer": finding.answer,
        "strength": finding.strength,
        "text": finding.text, "missing": finding.missing, "error": finding.error, "lines": [_cite(ref,
        ids) for ref in finding.refs],
    }  # fmt: skip


class _Document:
    """Builds the document's values."""

    def __init__(
        self, case: CaseFile, view: View, result: Classification, matches: tuple[Match, ...],
        forecast: tuple[SchedulerDump, PaddingForecast] | None, ids: _EvidenceIds, ground: Ground,
    ) -> None:  # fmt: skip
        self.case, self.view, self.result, self.matches = case, view, result, matches
        self.forecast, self.ids, self.ground = forecast, ids, ground

    def build(self, moments: Any) -> dict[str, Any]:
        result = self.result
        facts, judged = self._deciding_device()
        prior = _read_prior(self.case)
        unread = self._unread()
        waits = self._waits(facts, judged) if result.class_ != "not-hung" else ()
        if result.class_ == "gpu-spin-barrier" and not waits and not unread:
            unread.append(UnreadItem(what="the wait", why="no line shows the polled value and its target", remedy=result.next))
        identity = (
            judged.verdict.identity
            if judged is not None and judged.verdict.class_ == result.class_
            else _identity(self.view, result)
        )
        verdict: dict[str, Any] = {
            "class": result.class_, "cause": result.cause, "confidence": result.confidence, "signature": self._signature(),
            "identity": identity, "sentence": self._sentence(),
        }  # fmt: skip
        document: dict[str, Any] = {
            "outcome": outcome_of(result.class_), "ground": self.ground, "verdict": Verdict.model_validate(verdict), "waits": waits,
            "ledger": self._ledger(judged),
            "chain": self._chain(facts, judged), "window": self._window(), "unread": tuple(unread),
            "evidence": tuple(self.ids.records),
            "next": result.next,
            "decisive": [_finding(f, self.ids) for f in result.merged.decisive],
            "contradicting": [_finding(f, self.ids) for f in result.merged.against],
            "explained": dict(result.merged.explained),
            "alternatives": [{"class": a.class_, "why_open": a.why_open, "decided_by": a.decided_by} for a in result.alternatives],
            "signatures": [self._match(m) for m in self.matches[:8]],
            "inputs": part_table(self.case),
            "timeline": moments.document(),
            "rules": [_finding(f, self.ids) for f in result.findings],
        }  # fmt: skip
        if prior is not None:
            document = _with_prior(document, *prior, self.ids)
        return document

    def _deciding_device(self) -> tuple[DeviceFacts | None, Any]:
        """The look at a device that the verdict rests on, and its full judgement."""
        for facts, judged in full_judgements(self.view):
            if judged.verdict.class_ == self.result.class_ and (
                self.result.cause is None or judged.verdict.cause in (self.result.cause, None)
            ):
                return facts, judged
        for facts, _, own in resident_judgements(self.view):
            if own.class_ == self.result.class_:
                return facts, None
        return None, None

    def _waits(self, facts: DeviceFacts | None, judged: Any) -> tuple[Wait, ...]:
        if judged is not None and judged.waits:
            return tuple(judged.waits)
        found: list[Wait] = []
        for looked, kernel, own in resident_judgements(self.view):
            if own.poll is None or kernel.grid is None or (facts is not None and looked is not facts):
                continue
            poll = own.poll
            block = poll.block or (kernel.blocks[0].index if kernel.blocks else (0, 0, 0))
            group = own.group_size
            found.append(
                Wait(
                    kernel=kernel.name, grid=kernel.grid, block=block, pc_offset=poll.pc_offset,
                    address=hex(poll.address) if poll.address is not None else None, value=poll.value, target=poll.target,
                    comparison=poll.comparison, group=block[0] // group if group else None,
                    role=("leader" if block[0] % group == 0 else "peer") if group else None, device=kernel.device, rank=looked.rank,
                    instructions=poll.instructions,
                )
            )  # fmt: skip
        return tuple(found)

    def _ledger(self, judged: Any) -> tuple[LedgerGroup, ...]:
        """The full judgement's ledger; else, from the block list alone, the groups that hold a resident block."""
        if self.result.class_ != "gpu-spin-barrier":
            return ()
        if judged is not None and judged.ledger:
            return tuple(judged.ledger)
        for _, kernel, own in resident_judgements(self.view):
            size = own.group_size
            if (
                own.class_ != "gpu-spin-barrier"
                or not size
                or not kernel.blocks
                or kernel.grid is None
                or kernel.grid[1:] != (1, 1)
            ):
                continue
            resident = {block.index[0] for block in kernel.blocks}
            return tuple(
                _group(number, size, resident, kernel.grid[0], own.cause) for number in sorted({b // size for b in resident})[:64]
            )
        return ()

    def _unread(self) -> list[UnreadItem]:
        items = {(item.what, item.why): item for item in self.case.unread}
        for failure in self.case.failures:
            where = failure.ref.place()
            items.setdefault(
                (failure.what, failure.why), UnreadItem(what=failure.what, why=f"{failure.why} ({where})", remedy=failure.remedy)
            )
        return list(items.values())

    def _signature(self) -> str | None:
        matched = [m for m in self.matches if m.standing == "match"]
        if not matched:
            return None
        best = matched[0]
        if len(matched) > 1 and len(matched[1].seen) == len(best.seen):
            return None
        return best.signature.name

    def _match(self, match: Match) -> dict[str, Any]:
        signature = match.signature
        return {
            "name": signature.name, "title": signature.title, "standing": match.standing, "seen": list(match.seen),
            "not_read": list(match.not_read),
            "against": list(match.against), "upstream": list(signature.upstream), "affected": signature.affected,
            "fixed": signature.fixed,
            "workaround": signature.workaround, "fix": signature.fix, "note": signature.note, "sentence": match.sentence(),
        }  # fmt: skip

    def _sentence(self) -> str:
        sentence = self.result.sentence
        if self.forecast is not None and self.result.class_ in ("unknown", "gpu-kernel-stuck"):
            sentence = f"{sentence} {_forecast_sentence(self.forecast[1])}"
        return sentence

    def _window(self) -> Window:
        if self.forecast is None:
            return Window()
        f = self.forecast[1]
        return Window(
            live_requests=f.live_requests,
            rows=f.rows,
            graph_rows=f.graph_rows,
            padded_requests=f.padded_requests,
            reached=f.padded_requests > 0,
        )

    def _host_sentence(self) -> tuple[str, tuple[str, ...]]:
        threads = [
            t
            for p in self.view.processes
            for t in p.threads
            if t.waits in ("cuda-event", "cuda-launch", "engine-wait-reply", "queue-get")
        ]
        waits = [e for e in self.view.symptoms if e.kind in ("shm-wait", "rpc-timeout")]
        parts = []
        held = [t for t in threads if t.waits == "cuda-event"]
        if held:
            parts.append(f"{held[0].thread or 'a thread'} waits for a CUDA event ({held[0].inside})")
        if waits:
            parts.append(f"the engine printed {len(waits)} waiting line(s)")
        return "; ".join(parts), self.ids.of_all([*(t.ref for t in held[:2]), *(e.ref for e in waits[:2])])

    def _chain(self, facts: DeviceFacts | None, judged: Any) -> tuple[ChainLink, ...]:
        """The full judgement's links, with what the log adds to the upper ones. Only for barriers, and for a predicted trigger."""
        if self.result.class_ not in ("gpu-spin-barrier", "gpu-kernel-stuck", "unknown") or (
            judged is None and self.forecast is None
        ):
            return ()
        host, host_ids = self._host_sentence()
        links: dict[str, ChainLink] = {}
        if judged is not None and facts is not None:
            own = self.ids.of(facts.ref)
            for link in judged.chain:
                cited = (own,) if own and link.status in ("measured", "interpreted") else ()
                links[link.link] = ChainLink(link=link.link, status=link.status, text=link.text, evidence=cited)
        if self.forecast is not None:
            dump, f = self.forecast
            ids = self.ids.of_all([dump.ref])
            finished = f"; {dump.finished} finished in the step before" if dump.finished else ""
            links["drain"] = ChainLink(
                link="drain",
                status="measured",
                text=f"{f.live_requests} requests were left in the decode batch{finished}",
                evidence=ids,
            )
            links["mtp"] = ChainLink(
                link="mtp",
                status="measured",
                text=f"each carries {f.tokens_each} query positions: {f.live_requests} x {f.tokens_each} = {f.rows} rows",
                evidence=ids,
            )
            sizes = "vLLM's default capture sizes" if f.assumed else "the capture sizes in the log"
            text = f"{f.rows} rows in a graph of {f.graph_rows} ({sizes}): {f.padded_requests} padded request(s)"
            links["graph-padding"] = ChainLink(link="graph-padding", status="inferred" if f.assumed else "computed", text=text)
        if host:
            links["host"] = ChainLink(link="host", status="measured", text=host, evidence=host_ids)
        order = ("drain", "mtp", "graph-padding", "producer", "compression", "dispatch", "disagreement", "barrier", "host")
        return tuple(links[name] for name in order if name in links)


def _group(number: int, size: int, resident: set[int], total: int, cause: str | None) -> LedgerGroup:
    members = [block for block in range(number * size, (number + 1) * size) if block < total]
    absent = tuple(block for block in members if block not in resident)
    spinning = tuple(block for block in members if block in resident)
    if cause in ("peer-left", "reset-race"):
        return LedgerGroup(group=number, spinning=spinning, exited=absent, inferred="exited: not on the device, which has room")
    if cause == "not-co-resident":
        started = tuple(block for block in absent if block < max(resident))
        waiting = tuple(block for block in absent if block > max(resident))
        return LedgerGroup(
            group=number,
            spinning=spinning,
            exited=started,
            never_started=waiting,
            inferred="never started: blocks start in order, no room",
        )
    return LedgerGroup(group=number, spinning=spinning, unknown=absent)


def _forecast_sentence(f: PaddingForecast) -> str:
    if f.padded_requests <= 0:
        return f"The scheduler dump shows no padding: {f.live_requests} x {f.tokens_each} = {f.rows} is a captured size."
    sizes = " (default capture sizes)" if f.assumed else ""
    return (
        f"The scheduler dump predicts the trigger of vllm-51593: {f.live_requests} x {f.tokens_each} = {f.rows} rows in a graph of "
        f"{f.graph_rows}{sizes}, so {f.padded_requests} padded request(s)."
    )


def _identity(view: View, result: Classification) -> str | None:
    """A stable identity for classes without a device state: class, cause and the one name that tells such hangs apart."""
    if result.class_ in ("unknown", "not-hung"):
        return None
    key = ""
    if result.class_ == "host-cpu-livelock":
        key = next((f"{p.main.frames[0].function} {p.main.frames[0].file.rsplit('/', 1)[-1]}" for p in view.engines if p.main), "")
    elif result.class_.startswith("host-jit"):
        key = next(
            (t.inside.split(":")[0] for p in view.processes for t in p.threads if t.waits in ("jit-compile", "jit-lock")), ""
        )
    elif result.class_.startswith("collective"):
        key = next((op for q in view.case.ras for c in q.comms for op, g in c.groups.items() if len({n for _, n in g}) > 1), "")
    elif result.class_ in ("gpu-kernel-stuck", "gpu-crossrank-spin", "gpu-barrier-intra-block", "gpu-spin-barrier"):
        key = next((k.name.split("<")[0].split("(")[0] for d in view.devices for k in d.kernels or ()), "")
    return hashlib.sha256("|".join((result.class_, result.cause or "", key)).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------------------------------------------------------------
# An earlier diagnosis among the evidence


def _descends(child: str, parent: str) -> bool:
    current: str | None = child
    while current is not None:
        if current == parent:
            return True
        current = weaker_parent(current)
    return False


def _with_prior(document: dict[str, Any], earlier: Diagnosis, ref: Ref, ids: _EvidenceIds) -> dict[str, Any]:
    """A run's own diagnosis knew what the artefacts no longer hold. It is taken over where ours is a weaker form of it; where the
    two contradict each other, ours stands and the other is named."""
    ours: Verdict = document["verdict"]
    theirs = earlier.verdict
    note = {"rule": "earlier-diagnosis", "class": theirs.class_, "cause": theirs.cause, "answer": "supported", "strength": 0,
            "text": f"an earlier diagnosis of this run: {theirs.sentence}", "missing": "", "error": "", "lines": [_cite(ref,
            ids)]}  # fmt: skip
    same = theirs.class_ == ours.class_ and (ours.cause in (None, theirs.cause))
    if not (same or (theirs.class_ != "unknown" and _descends(theirs.class_, ours.class_))):
        if theirs.class_ != ours.class_ and theirs.class_ != "unknown" and not _descends(ours.class_, theirs.class_):
            document["contradicting"].append(note)
        return document
    known = {record.id for record in ids.records}
    order: dict[str, int] = {"low": 0, "medium": 1, "high": 2}
    confidence: Confidence = (
        theirs.confidence if order[theirs.confidence] >= order[ours.confidence] or not same else ours.confidence
    )
    document["verdict"] = Verdict.model_validate({
        "class": theirs.class_, "cause": theirs.cause or ours.cause, "confidence": confidence, "signature": ours.signature
        or theirs.signature,
        "identity": theirs.identity or ours.identity, "sentence": theirs.sentence or ours.sentence,
    })  # fmt: skip
    document["outcome"] = outcome_of(theirs.class_)
    document["decisive"] = [*document["decisive"], note]
    if theirs.class_ != "not-hung":
        document["waits"] = document["waits"] or earlier.waits
    document["ledger"] = document["ledger"] or earlier.ledger
    if earlier.window.live_requests is not None and document["window"].live_requests is None:
        document["window"] = earlier.window
    if len(earlier.chain) >= len(document["chain"]):
        own = ids.of(ref)
        document["chain"] = tuple(
            ChainLink(
                link=link.link, status=link.status, text=link.text,
                evidence=tuple(name for name in link.evidence if name in known) or ((own,
                    ) if own and link.status != "not observed" else ()),
            )
            for link in earlier.chain
        )  # fmt: skip
    if theirs.class_ == "gpu-spin-barrier" and not document["waits"] and not document["unread"]:
        document["unread"] = earlier.unread or (UnreadItem(what="the wait", why="the earlier diagnosis does not hold it"),)
    return document


def _read_prior(case: CaseFile) -> tuple[Diagnosis, Ref] | None:
    for document, ref in reversed(case.prior):
        try:
            earlier = Diagnosis.model_validate(document)
        except ValueError as error:
            case.unread.append(
                UnreadItem(what=f"the diagnosis in {ref.source}", why=f"it is not one of schema 1: {str(error)[:200]}")
            )
            continue
        if earlier.verdict.class_ in CLASSES:
            return earlier, ref
    return None
