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

from .agent_chain import agent_links, agent_step, stronger
from .citations import EvidenceIds, finding_row
from .classify import Classification, classify
from .earlier import read_earlier, with_earlier
from .evidence.archive import Budget
from .evidence.casefile import CaseFile, InputPart
from .evidence.facts import DeviceFacts, SchedulerDump
from .evidence.gather import part_table, read_paths
from .evidence.scheduler_dump import PaddingForecast, forecast_padding
from .evidence.timeline import TimelineEvent, timeline
from .records import (
    ChainLink,
    Diagnosis,
    LedgerGroup,
    UnreadItem,
    Verdict,
    Wait,
    Window,
    outcome_of,
)
from .rules.agent_view import AgentRank
from .rules.agents import overdue
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
    ids = EvidenceIds(case)
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


class _Document:
    """Builds the document's values."""

    def __init__(
        self, case: CaseFile, view: View, result: Classification, matches: tuple[Match, ...],
        forecast: tuple[SchedulerDump, PaddingForecast] | None, ids: EvidenceIds, ground: Ground,
    ) -> None:  # fmt: skip
        self.case, self.view, self.result, self.matches = case, view, result, matches
        self.forecast, self.ids, self.ground = forecast, ids, ground

    def build(self, moments: Any) -> dict[str, Any]:
        result = self.result
        facts, judged = self._deciding_device()
        prior = read_earlier(self.case)
        unread = self._unread()
        waits = self._waits(facts, judged) if result.class_ != "not-hung" else ()
        if result.class_ == "gpu-spin-barrier" and not waits and not unread:
            known = any(one.wait is not None for one in self.view.agents)
            what = "the wait's instruction and target" if known else "the wait"
            why = "memory alone was read, no block" if known else "no line shows the polled value and its target"
            unread.append(UnreadItem(what=what, why=why, remedy=result.next))
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
            "decisive": [finding_row(f, self.ids) for f in result.merged.decisive],
            "contradicting": [finding_row(f, self.ids) for f in result.merged.against],
            "explained": dict(result.merged.explained),
            "alternatives": [{"class": a.class_, "why_open": a.why_open, "decided_by": a.decided_by} for a in result.alternatives],
            "signatures": [self._match(m) for m in self.matches[:8]],
            "inputs": part_table(self.case),
            "timeline": moments.document(),
            "rules": [finding_row(f, self.ids) for f in result.findings],
        }  # fmt: skip
        if prior is not None:
            document = with_earlier(document, *prior, self.ids)
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
        # The full reader of a look counts groups and room, which the catalogue does not ask for: where they differ, none is named.
        named = {
            judged.verdict.signature
            for facts in self.view.devices
            for judged in (facts.diagnosis, facts.diagnosis_hung)
            if judged is not None
            and judged.verdict.signature is not None
            and (judged.verdict.class_, judged.verdict.cause) == (self.result.class_, self.result.cause)
        }
        return best.signature.name if not named or best.signature.name in named else None

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

    def _agent(self, device: DeviceFacts | None, judged: Any) -> AgentRank | None:
        """The worker whose agent tells most of the stand-still: one with the wait first. Where the verdict rests on a look at a
        device, that device's worker alone, known by its pid, its rank, or the word that is polled: ranks are not mixed."""
        late = [one for one in self.view.agents if one.wait is not None or overdue(one)]
        if device is not None and device.pid is not None:
            late = [one for one in late if one.pid == device.pid]
        elif device is not None and device.rank is not None:
            late = [one for one in late if one.rank == device.rank]
        elif device is not None and len(self.view.agents) > 1:
            polled = {wait.address for wait in judged.waits} if judged is not None else set()
            late = [one for one in late if one.wait is not None and hex(one.wait.address) in polled]
            late = late if len(late) == 1 else []
        return next((one for one in late if one.wait is not None), late[0] if late else None)

    def _window(self) -> Window:
        held = self._agent(*self._deciding_device())
        step = agent_step(held) if held is not None else None
        if step is not None:
            return Window(
                live_requests=step.live_requests, rows=step.rows, graph_rows=step.graph_rows, padded_requests=step.padded_requests,
                reached=None if step.padded_requests is None else step.padded_requests > 0,
            )  # fmt: skip
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
        held = self._agent(facts, judged)
        if self.result.class_ not in ("gpu-spin-barrier", "gpu-kernel-stuck", "unknown") or (
            judged is None and self.forecast is None and held is None
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
        added = agent_links(held, self.ids.of_all) if held is not None else {}
        if judged is None and self.result.class_ != "gpu-spin-barrier":
            added = {name: link for name, link in added.items() if name in ("drain", "mtp", "graph-padding")}
        return tuple(stronger(links, added).values())


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
        names = [k.name.split("<")[0].split("(")[0] for d in view.devices for k in d.kernels or ()]
        names += ["persistent_topk_kernel" for one in view.agents if one.wait is not None]
        key = next(iter(names), "")
    return hashlib.sha256("|".join((result.class_, result.cause or "", key)).encode()).hexdigest()[:12]
