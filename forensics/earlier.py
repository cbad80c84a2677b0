"""An earlier diagnosis among the evidence: what a run or a bundle said of itself. It is evidence, not truth."""

from __future__ import annotations

from typing import Any

from .citations import EvidenceIds, cite
from .evidence.casefile import CaseFile
from .evidence.refs import Ref
from .records import CLASSES, ChainLink, Confidence, Diagnosis, UnreadItem, Verdict, outcome_of, weaker_parent

__all__ = ["read_earlier", "with_earlier"]


def _descends(child: str, parent: str) -> bool:
    current: str | None = child
    while current is not None:
        if current == parent:
            return True
        current = weaker_parent(current)
    return False


def with_earlier(document: dict[str, Any], earlier: Diagnosis, ref: Ref, ids: EvidenceIds) -> dict[str, Any]:
    """A run's own diagnosis knew what the artefacts no longer hold. It is taken over where ours is a weaker form of it; where the
    two contradict each other, ours stands and the other is named."""
    ours: Verdict = document["verdict"]
    theirs = earlier.verdict
    note = {"rule": "earlier-diagnosis", "class": theirs.class_, "cause": theirs.cause, "answer": "supported", "strength": 0,
            "text": f"an earlier diagnosis of this run: {theirs.sentence}", "missing": "", "error": "", "lines": [cite(ref,
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


def read_earlier(case: CaseFile) -> tuple[Diagnosis, Ref] | None:
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
