"""``dsv4-repro bundle``: one archive to attach to an issue, redacted, under a size limit, with hashes and what is not in it.

A bundle is a zip with one folder that is laid out like a run directory, so everything that judges a run judges a bundle::

    manifest.json     what is in it with sha256, what is not and why
    redaction.json    what was replaced where, by kind, rule, file and line; never the values
    SHA256SUMS        for ``sha256sum -c``
    README.txt        how to read it
    reproduce.sh      the command of the run, and how to judge the evidence again
    environment.json  packages, GPUs, driver, topology, container limits, deadlines in force
    run.json  diagnosis.json  timeline.jsonl  report.md  report.html  junit.xml
    evidence/         index.json and the artefacts

Entries are sorted, dated 1980 and mode 0600, so the same run and the same salt give the same bytes. Nothing is sent anywhere.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from ..errors import RunStoreError
from ..forensics.records import Diagnosis
from . import paths
from .bundle_files import Made, Maker, SourceFile
from .bundle_manifest import (
    BUNDLE_SCHEMA,
    ENVIRONMENT,
    MANIFEST,
    README,
    REDACTION,
    REPRODUCE,
    SUMS,
    manifest_document,
    readme_text,
    redaction_document,
    reproduce_script,
)
from .bundle_plan import Decision, Piece, fit
from .bundle_zip import digest_of, packed_size, write_zip
from .document import ReportSource, verdict_words
from .html import ReportExtras
from .redact import Redactor
from .redact_json import redact_json
from .render import render_all
from .stacks_fold import HostThread
from .timeline_data import build_timeline

__all__ = ["BUNDLE_SCHEMA", "ENVIRONMENT", "MANIFEST", "REDACTION", "BundleRequest", "Bundled", "write_bundle"]

#: Of the limit, kept for what is not counted piece by piece: manifest, redaction report, README and sums.
_RESERVE = 64 << 10


@dataclass(frozen=True)
class BundleRequest:
    """All that a bundle is made from. ``documents``: run, diagnosis and evidence index as they are; ``source``: of the reports.

    ``environment``: a document; ``created``: wall time, ISO 8601; ``name``: of the folder in the archive; ``max_bytes``: of the
    zip; ``not_here``: (path, why) of what the run directory does not hold.
    """

    source: ReportSource
    run: Mapping[str, Any]
    diagnosis: Mapping[str, Any] | None
    index: Mapping[str, Any] | None
    files: Sequence[SourceFile]
    timeline: Path | None
    environment: Mapping[str, Any]
    name: str
    version: str
    created: str
    max_bytes: int
    raw: bool = False
    keep: Sequence[str] = ()
    not_here: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Bundled:
    """What was written: the manifest and redaction documents, and what was cut or dropped for size."""

    manifest: Mapping[str, Any]
    redaction: Mapping[str, Any]
    decisions: Sequence[Decision] = field(default_factory=tuple)


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n").encode("utf-8", "backslashreplace")


def _cited(diagnosis: Mapping[str, Any] | None) -> dict[str, set[int]]:
    """Source -> lines that the diagnosis cites; these survive a cut."""
    found: dict[str, set[int]] = {}
    for key in ("decisive", "contradicting", "rules"):
        for finding in (diagnosis or {}).get(key) or ():
            lines = finding.get("lines") if isinstance(finding, Mapping) else None
            for ref in lines if isinstance(lines, list) else ():
                if isinstance(ref, Mapping) and ref.get("unit", "line") == "line" and isinstance(ref.get("first"), int):
                    lines_of_source = found.setdefault(str(ref.get("source", "")), set())
                    last = ref["last"] if isinstance(ref.get("last"), int) else ref["first"]
                    lines_of_source.update(range(ref["first"], min(last, ref["first"] + 400) + 1))
    return found


def _cited_by_path(diagnosis: Mapping[str, Any] | None, files: Sequence[SourceFile]) -> dict[str, set[int]]:
    """The same by the files of the run: a source may be named by its last parts alone."""
    cited = _cited(diagnosis)
    return {
        file.path: set().union(
            *(lines for source, lines in cited.items() if source and (file.path == source or file.path.endswith("/" + source)))
        )
        for file in files
    }


def _renamed(document: Any, mapping: Mapping[str, str]) -> Any:
    """Every text with old paths and hashes replaced by those of the bundle."""
    if not mapping:
        return document
    pattern = re.compile("|".join(re.escape(old) for old in sorted(mapping, key=len, reverse=True)))

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: mapping[match.group()], value)
        if isinstance(value, Mapping):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return value

    return walk(document)


def _content(item: Made | bytes) -> Path | bytes:
    """What goes into the archive: the bytes, or the file that holds them."""
    return item if isinstance(item, bytes) else item.place


class _Builder:
    def __init__(self, request: BundleRequest, redactor: Redactor, folder: Path) -> None:
        self.request = request
        self.redactor = redactor
        self.maker = Maker(redactor, folder, request.raw, _cited_by_path(request.diagnosis, request.files))
        self.folder = folder
        self.made: list[Made] = []

    # -- passes --------------------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        for document in (self.request.run, self.request.diagnosis, self.request.environment):
            if document is not None:
                self.redactor.learn(json.dumps(document, ensure_ascii=False, default=str))
        for file in self.request.files:
            self.maker.learn(file)
        if self.request.timeline is not None:
            self.maker.learn(SourceFile(paths.TIMELINE, self.request.timeline))
        self.redactor.seal()

    def evidence(self) -> None:
        for file in self.request.files:
            self.made += self.maker.make(file)
        if self.request.timeline is not None:
            for made in self.maker.make(SourceFile(paths.TIMELINE, self.request.timeline, "timeline")):
                made.rank = 2
                self.made.append(made)

    def mapping(self) -> dict[str, str]:
        """Old hashes and paths to new ones. Of a file that was changed, the old hash would let anybody test guesses of what was
        replaced, so it is nowhere in the bundle."""
        found: dict[str, str] = {}
        first: dict[str, Made] = {}
        for made in self.made:
            first.setdefault(made.source, made)
        for file in self.request.files:
            stands = first.get(file.path)
            old = file.sha256
            if old and re.fullmatch(r"[0-9a-f]{64}", old):
                found[old] = digest_of(stands.place)[0] if stands is not None else "(left out)"
            if stands is not None and stands.name != file.path:
                found[file.path] = stands.name
        return found

    # -- documents -----------------------------------------------------------------------------------------------------------------

    def documents(self) -> dict[str, bytes]:
        request, redact = self.request, self.redactor
        mapping = self.mapping()
        self._rename_timeline(mapping)
        run = redact_json(redact, _renamed(copy.deepcopy(dict(request.run)), mapping), paths.RUN)
        environment = redact_json(redact, _renamed(copy.deepcopy(dict(request.environment)), mapping), ENVIRONMENT)
        out = {paths.RUN: _json(run), ENVIRONMENT: _json(environment)}
        if request.index is not None:
            out[f"{paths.EVIDENCE}/{paths.EVIDENCE_INDEX}"] = _json(
                redact_json(redact, self._index(mapping), "evidence/index.json")
            )
        if request.diagnosis is not None:
            document = redact_json(
                redact, self._known_hashes(_renamed(copy.deepcopy(dict(request.diagnosis)), mapping)), paths.DIAGNOSIS
            )
            try:
                diagnosis = Diagnosis.model_validate(document)
            except ValidationError as error:
                raise RunStoreError(f"the redacted diagnosis is no diagnosis any more: {error.error_count()} errors") from error
            out[paths.DIAGNOSIS] = _json(document)
            out |= self._reports(diagnosis, run)
        command = [str(word) for word in run.get("command") or ()]
        out[REPRODUCE] = reproduce_script(command)
        return out

    def _known_hashes(self, diagnosis: Any) -> Any:
        """Hashes of files as they were before the redaction go, also of files that are not in the run directory."""
        ours = {digest_of(made.place)[0] for made in self.made}
        for key in ("inputs", "evidence"):
            for entry in diagnosis.get(key) or ():
                if isinstance(entry, dict) and entry.get("sha256") not in ours:
                    entry["sha256"] = None
        return diagnosis

    def _index(self, mapping: Mapping[str, str]) -> Any:
        """The evidence index with the bundle's names, hashes and sizes; what is not in the bundle says so."""
        index = _renamed(copy.deepcopy(dict(self.request.index or {})), mapping)
        by_name = {made.name: made for made in self.made}
        for entry in index.get("entries") or ():
            if not isinstance(entry, dict):
                continue
            made = by_name.get(str(entry.get("path")))
            if made is None:
                entry["bundle"] = "left out"
            else:
                entry["sha256"], entry["size"] = digest_of(made.place)
                entry["bundle"] = made.how
        return index

    def _rename_timeline(self, mapping: Mapping[str, str]) -> None:
        for made in self.made:
            if made.name != paths.TIMELINE or not mapping:
                continue
            pattern = re.compile(b"|".join(re.escape(old.encode()) for old in sorted(mapping, key=len, reverse=True)))
            renamed = made.place.with_name(made.place.name + ".renamed")
            with made.place.open("rb") as stream, renamed.open("wb") as out:
                for line in stream:
                    out.write(pattern.sub(lambda match: mapping[match.group().decode()].encode(), line))
            made.place = renamed

    def _reports(self, diagnosis: Diagnosis, run: Mapping[str, Any]) -> dict[str, bytes]:
        source = self.request.source
        clean = dataclasses.replace(
            source,
            diagnosis=diagnosis,
            run=run if source.run else {},
            title=self.redactor.text(source.title, paths.REPORT_MD, 0),
            targets=[self.redactor.text(target, paths.REPORT_MD, 0) for target in source.targets],
        )
        timeline = None
        for made in self.made:
            if made.name == paths.TIMELINE:
                timeline = build_timeline(_timeline_lines(made.place), diagnosis)
        extras = ReportExtras(timeline=timeline, threads=self.threads())
        return render_all(clean, extras)

    def threads(self) -> list[HostThread]:
        """Host threads out of the redacted stacks."""
        from .stack_reader import read_threads

        return read_threads([(made.name, made.place) for made in self.made if made.rank == 4])

    # -- the archive ---------------------------------------------------------------------------------------------------------------

    def write(self, out: BinaryIO) -> Bundled:
        request = self.request
        documents = self.documents()
        ranks = {"report.html": 1}
        places: dict[str, Made | bytes] = {**{made.name: made for made in self.made}, **documents}
        pieces = [self._piece(name, item, ranks) for name, item in places.items()]
        budget = request.max_bytes - _RESERVE
        kept, decisions = fit(pieces, budget, lambda name: self._smaller(name, places))
        names = {piece.name for piece in kept}
        hashes = {name: digest_of(_content(places[name])) for name in sorted(names)}
        redaction = redaction_document(request.keep, self.redactor.tally.document())
        manifest = self._manifest(places, names, hashes, decisions)
        final = {name: _content(item) for name, item in places.items() if name in names}
        final[REDACTION] = _json(redaction)
        words = verdict_words(request.source.diagnosis) if request.diagnosis is not None else "no diagnosis in the run directory"
        final[README] = readme_text(request.version, request.created, words, manifest)
        final[MANIFEST] = _json(manifest)
        sums = [f"{digest_of(item)[0]}  {name}" for name, item in sorted(final.items())]
        final[SUMS] = ("\n".join(sums) + "\n").encode()
        write_zip(out, request.name, final)
        return Bundled(manifest, redaction, decisions)

    def _piece(self, name: str, item: Made | bytes, ranks: Mapping[str, int]) -> Piece:
        packed = packed_size(_content(item), f"{self.request.name}/{name}")
        return Piece(name, packed, ranks.get(name, 0) if isinstance(item, bytes) else item.rank)

    def _smaller(self, name: str, places: Mapping[str, Made | bytes]) -> int | None:
        item = places[name]
        if isinstance(item, bytes) or not self.maker.shrink(item):
            return None
        return self._piece(name, item, {}).packed

    def _manifest(
        self,
        places: Mapping[str, Made | bytes],
        names: set[str],
        hashes: Mapping[str, tuple[str, int]],
        decisions: Sequence[Decision],
    ) -> dict[str, Any]:
        request = self.request
        files = []
        for name in sorted(names):
            item = places[name]
            digest, size = hashes[name]
            entry: dict[str, Any] = {"path": name, "sha256": digest, "size": size}
            if isinstance(item, bytes):
                entry |= {"how": "made", "kind": "record"}
            else:
                entry |= {"how": item.how, "kind": item.kind, "origin": item.origin, "note": item.note}
            files.append(entry)
        gone = [
            {"path": self.redactor.text(path, "file names", 0), "why": self.redactor.text(why, MANIFEST, 0)}
            for path, why in (*self.maker.left_out, *request.not_here)
        ]
        gone += [{"path": decision.name, "why": f"dropped: {decision.why}"} for decision in decisions if decision.what == "dropped"]
        return manifest_document(
            created=request.created,
            version=request.version,
            diagnosis=json.loads(_json(request.diagnosis)) if request.diagnosis is not None else None,
            raw=request.raw,
            max_bytes=request.max_bytes,
            files=files,
            left_out=gone,
        )


def _timeline_lines(path: Path) -> list[Any]:
    from ..forensics.device_state import Unread

    lines: list[Any] = []
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            lines.append(
                line
                if isinstance(line, dict) and isinstance(line.get("kind"), str)
                else Unread(f"{paths.TIMELINE} line {number}", "not JSON")
            )
            if number > 500_000:
                break
    return lines


def write_bundle(request: BundleRequest, redactor: Redactor, folder: Path, out: BinaryIO) -> Bundled:
    """Make the bundle's files in ``folder`` (private, empty) and write the archive. Raises RunStoreError if it cannot fit."""
    builder = _Builder(request, redactor, folder)
    builder.learn()
    builder.evidence()
    return builder.write(out)
