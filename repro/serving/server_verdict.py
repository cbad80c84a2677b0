"""One diagnosis of a hung server from what was captured on all its ranks.

Same class, cause and identity on every held rank: one verdict that lists them. A rank held by something of its own while its peers
poll another GPU: the held one is named, the others are its victims. All ranks in communication, or nothing readable on the GPUs:
the classifier judges stacks, RAS answers, logs and counters together, and what it cannot tell stays ``gpu-kernel-stuck`` or
inconclusive. Each chain link cites the evidence of the rank that it was read on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ReproError
from ...forensics.autopsy import autopsy_paths
from ...forensics.chain import ChainInput, StepFacts, causal_chain
from ...forensics.device_state import Unread
from ...forensics.evidence.archive import Budget
from ...forensics.records import ChainLink, Diagnosis, Evidence, UnreadItem, Window, outcome_of
from ...kernels.abi import RADIX_THRESHOLD
from ..captured import all_unread
from ..ground import CaptureOutcome
from .host_sentence import host_sentence
from .rank_verdict import RankVerdict, judge_rank
from .ranks import output_rank
from .records import Assessment, Rank, ServerTarget, Snapshot
from .server_decision import Decision, decide, memory_verdict
from .server_evidence import evidence_of, ids_of, rank_evidence, ras_state, text_files

__all__ = ["diagnose_server"]

#: The classifier reads the capture's text files within so long, seconds.
_CLASSIFY_S = 20.0


def diagnose_server(
    captures: Sequence[CaptureOutcome],
    snapshot: Snapshot | None,
    assessment: Assessment,
    folder: Path,
    *,
    target: ServerTarget | None = None,
    step: StepFacts | None = None,
    evidence: Sequence[Evidence] = (),
    unwedge: Any = None,
    classify: bool = True,
) -> Diagnosis:
    """``folder``: where the capture wrote; ``evidence``: its files as the run's index names them, made here if there are none.
    ``step``: the plan's figures of the step, for what was not measured. ``classify``: read the text files with the classifier too.
    """
    hung = assessment.state == "hung"
    listed = tuple(evidence) or evidence_of(captures, folder)
    ranks = _ranks(captures, target)
    rings = _facts(captures, "recorder_rings").get("rings", {})
    names = _facts(captures, "nvml").get("names", {})
    files = text_files(captures)
    reading = _classified(files) if classify and files else None
    host, host_ids = host_sentence(files, listed) if files else ("", ())
    judged = [
        judge_rank(
            rank, [one for one in captures if one.facts.get("pid") == rank.pid], hung=hung,
            evidence=rank_evidence(listed, captures, rank, folder), ring=rings.get(str(rank.pid)), names=names, planned=step,
            host=host, unwedge=unwedge,
        )
        for rank in ranks
    ]  # fmt: skip
    found = decide(judged, reading, assessment, hung=hung)
    document = _document(found, judged, reading, snapshot, assessment, target, captures, listed, host, host_ids, step)
    return Diagnosis.model_validate(document)


def _ranks(captures: Sequence[CaptureOutcome], target: ServerTarget | None) -> tuple[Rank, ...]:
    if target is not None and target.ranks:
        return target.ranks
    found: dict[int, Rank] = {}
    for capture in captures:
        pid, rank = capture.facts.get("pid"), capture.facts.get("rank")
        if isinstance(pid, int) and "child" in capture.facts:
            found.setdefault(pid, Rank(pid, rank if isinstance(rank, int) else None, 0, gpu_index=capture.facts.get("gpu_index")))
    return tuple(found.values())


def _facts(captures: Sequence[CaptureOutcome], collector: str) -> Mapping[str, Any]:
    return next((capture.facts for capture in captures if capture.collector == collector), {})


def _classified(files: Sequence[Path]) -> Diagnosis | None:
    try:
        return autopsy_paths(files, ground="server", budget=Budget(seconds=_CLASSIFY_S)).diagnosis
    except (ReproError, OSError):
        return None


# ---------------------------------------------------------------------------------------------------------------------------------
# The document


def _document(
    found: Decision,
    judged: Sequence[RankVerdict],
    reading: Diagnosis | None,
    snapshot: Snapshot | None,
    assessment: Assessment,
    target: ServerTarget | None,
    captures: Sequence[CaptureOutcome],
    listed: tuple[Evidence, ...],
    host: str,
    host_ids: tuple[str, ...],
    planned: StepFacts | None,
) -> dict[str, Any]:
    class_ = found.verdict.class_
    unread = _unread(judged, captures, target)
    clean = class_ == "not-hung"
    waits = [] if clean else [_with_rank(wait.model_dump(mode="json"), one) for one in judged for wait in one.waits]
    if class_ == "gpu-spin-barrier" and not waits and not unread:
        unread.append(UnreadItem(what="the wait", why="the group's size is not known: the card is not", remedy=found.next))
    ledger = [
        {**group.model_dump(mode="json"), "rank": one.rank.rank}
        for one in judged
        if one.role == "held" and one.diagnosis is not None
        for group in one.diagnosis.ledger
    ]
    primary = found.primary or next((one for one in judged if one.step is not None), None)
    step = primary.step if primary is not None else planned
    return {
        "outcome": outcome_of(class_),
        "ground": "server",
        "verdict": found.verdict.model_dump(mode="json", by_alias=True),
        "waits": waits,
        "ledger": [] if clean else ledger,
        "chain": [] if clean else _chain(primary, step, listed, captures, host, host_ids, snapshot),
        "window": _window(step, snapshot).model_dump(mode="json"),
        "unread": [item.model_dump(mode="json") for item in unread],
        "evidence": [item.model_dump(mode="json") for item in listed],
        "next": found.next,
        "ranks": [_rank_row(one) for one in judged],
        "output_rank": _output(target),
        "ras": ras_state(text_files(captures)),
        "assessment": {
            "state": assessment.state, "reasons": list(assessment.reasons), "device_signals": list(assessment.device_signals),
            "blind": [{"signal": item.signal, "why": item.why} for item in assessment.blind],
            "live_requests": assessment.live_requests,
        },
        "classifier": None if reading is None else {
            "verdict": reading.verdict.model_dump(mode="json", by_alias=True),
            "decisive": (reading.model_extra or {}).get("decisive", [])[:16],
        },
        "notes": list(dict.fromkeys(note for one in judged for note in one.notes)),
    }  # fmt: skip


def _with_rank(wait: dict[str, Any], one: RankVerdict) -> dict[str, Any]:
    device = one.rank.gpu_index if one.rank.gpu_index is not None else wait.get("device")
    return {**wait, "rank": one.rank.rank, "device": device, "pid": one.rank.pid}


def _rank_row(one: RankVerdict) -> dict[str, Any]:
    verdict = one.diagnosis.verdict if one.diagnosis is not None else memory_verdict(one) if one.known is not None else None
    return {
        "rank": one.rank.rank, "pid": one.rank.pid, "gpu_index": one.rank.gpu_index, "gpu_uuid": one.rank.gpu_uuid,
        "role": one.role,
        "class": verdict.class_ if verdict is not None else None, "cause": verdict.cause if verdict is not None else None,
        "identity": verdict.identity if verdict is not None else None, "sentence": verdict.sentence if verdict is not None else "",
        "kernels": list(one.kernels), "recovered": one.recovered, "read_by": "memory alone" if one.known is not None else
        "device state" if one.diagnosis is not None else None,
    }  # fmt: skip


def _output(target: ServerTarget | None) -> dict[str, Any]:
    if target is None:
        return {"rank": None, "why": "the server's processes were not given"}
    number, why = output_rank(target)
    return {"rank": number, "why": why}


def _unread(judged: Sequence[RankVerdict], captures: Sequence[CaptureOutcome], target: ServerTarget | None) -> list[UnreadItem]:
    items: list[Unread] = [*all_unread(captures), *(target.unread if target is not None else ())]
    found = [UnreadItem(what=item.what, why=item.why, remedy=item.remedy) for item in dict.fromkeys(items)]
    for one in judged:
        if one.diagnosis is not None:
            found += [item for item in one.diagnosis.unread if item not in found]
    return found


def _window(step: StepFacts | None, snapshot: Snapshot | None) -> Window:
    if step is None:
        running = snapshot.engine.running if snapshot is not None and snapshot.engine is not None else None
        return Window(live_requests=running)
    return Window(
        live_requests=step.live_requests, rows=step.rows, graph_rows=step.graph_rows, padded_requests=step.padded_requests,
        reached=None if step.padded_requests is None else step.padded_requests > 0,
    )  # fmt: skip


def _chain(
    primary: RankVerdict | None,
    step: StepFacts | None,
    listed: Sequence[Evidence],
    captures: Sequence[CaptureOutcome],
    host: str,
    host_ids: tuple[str, ...],
    snapshot: Snapshot | None,
) -> list[dict[str, Any]]:
    """The primary rank's nine links. What the recorder measured cites the ring, what the agent read its row states."""
    pid = primary.rank.pid if primary is not None else None
    if primary is not None and primary.diagnosis is not None:
        links = {link.link: link for link in primary.diagnosis.chain}
    else:
        links = {link.link: link for link in causal_chain(ChainInput("measured", host=host), step, ())}
    rings = ids_of(listed, captures, ("recorder-ring",), pid)
    states = ids_of(listed, captures, ("row-states-list",), pid)
    measured = step is not None and step.origin == "measured"
    for name in ("drain", "mtp", "graph-padding"):
        if measured and links[name].status == "measured":
            links[name] = links[name].model_copy(update={"evidence": rings})
    if not measured and snapshot is not None and snapshot.engine is not None and snapshot.engine.running is not None:
        text = f"{snapshot.engine.running} requests were running, by the engine's own counter"
        links["drain"] = ChainLink(
            link="drain", status="measured", text=text, evidence=ids_of(listed, captures, ("metrics",), None)
        )
    links |= _from_agent(primary, links, states)
    if host:
        links["host"] = ChainLink(link="host", status="measured", text=host, evidence=host_ids)
    return [link.model_dump(mode="json") for link in links.values()]


def _from_agent(primary: RankVerdict | None, links: Mapping[str, ChainLink], states: tuple[str, ...]) -> dict[str, ChainLink]:
    """Producer and barrier as the agent read them from device memory, where no other look measured them."""
    found: dict[str, ChainLink] = {}
    if primary is None or primary.known is None:
        return found
    launch, group = primary.known.launch, primary.known.group
    row = f"length of row {group}, read from device memory: {launch.lengths[group]} (a context length cannot be negative)"
    found["producer"] = ChainLink(link="producer", status="measured", text=row, evidence=states)
    target = primary.waits[0].target if primary.waits else None
    goal = f"its target is {target}, computed from the launch" if target is not None else "its target was not computed"
    text = f"arrival_counter at {primary.known.address:#x} is 1 in two reads; {goal}"
    found["barrier"] = ChainLink(link="barrier", status="measured", text=text, evidence=states)
    why = (
        f"peers decide once, from max_seq_len {launch.max_seq_len} <= {RADIX_THRESHOLD}, and return; the leader reads "
        f"the length of row {group} as unsigned and takes the path that all of its group must take"
    )
    found["disagreement"] = ChainLink(link="disagreement", status="inferred", text=why)
    return found
