"""The verb ``bundle RUN``: one redacted archive to attach, made on this machine and left on this machine.

And the way back: ``opened_bundle`` unpacks a bundle into a private folder, where it is a run directory like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import pwd
import re
import secrets
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..clock import SYSTEM, Clock, utc_stamp
from ..errors import EvidenceError, RefusedError, RunStoreError, UsageError
from ..reports import paths
from ..reports.bundle import BUNDLE_SCHEMA, MANIFEST, Bundled, BundleRequest, write_bundle
from ..reports.bundle_files import SourceFile, clean_name
from ..reports.document import ReportSource, verdict_words
from ..reports.redact import KeepError, Redactor, parse_keep
from .atomic import disk_error, sync_folder
from .bundle_environment import environment_document
from .console import Screen
from .reporting import report_source
from .runread import RunView, open_run, read_json_file
from .unpack import head_of

if TYPE_CHECKING:
    from .options import Common

__all__ = ["DEFAULT_MAX", "is_bundle", "make_bundle", "opened_bundle", "parse_size", "run_bundle"]

#: What GitHub takes as an attachment is 25 MB; this stays below it.
DEFAULT_MAX = 24_500_000
_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_MOST_FILES = 5000
_MOST_ENTRIES = 20_000
_MOST_UNPACKED = 4 << 30
_ENVIRONMENT_TEXT = 256 << 10


def parse_size(text: str) -> int:
    """``25MB``, ``10MiB``, ``1000000``: bytes. UsageError for anything else, and for less than 100 kB."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,3})?)\s*([a-zA-Z]{0,3})\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"--max-size {text[:40]}: give a number with MB, MiB or GB", help_text="For example: --max-size 25MB")
    size = int(float(match.group(1)) * unit)
    if size < 100_000:
        raise UsageError(f"--max-size {text[:40]}: the records alone need 100 kB")
    return size


# ---------------------------------------------------------------------------------------------------------------------------------
# What goes in


def _evidence_files(view: RunView) -> tuple[list[SourceFile], list[tuple[str, str]]]:
    """(regular files below ``evidence``, (path, why) of what is not taken). Links are not followed, names are not believed."""
    indexed = {entry.path: entry for entry in view.evidence}
    root = view.path / paths.EVIDENCE
    found: list[SourceFile] = []
    skipped: list[tuple[str, str]] = []
    for folder, names, files in os.walk(root, followlinks=False):
        names.sort()
        for name in sorted(files):
            place = Path(folder, name)
            relative = str(place.relative_to(view.path))
            if relative == f"{paths.EVIDENCE}/{paths.EVIDENCE_INDEX}":
                continue
            if len(found) >= _MOST_FILES:
                skipped.append((relative, f"more than {_MOST_FILES} files"))
                return found, skipped
            try:
                kind = place.lstat().st_mode
            except OSError as error:
                skipped.append((relative, f"cannot be read: {error.strerror}"))
                continue
            if not stat.S_ISREG(kind):
                skipped.append((relative, "a link: not followed" if stat.S_ISLNK(kind) else "not a regular file"))
                continue
            entry = indexed.get(relative)
            found.append(
                SourceFile(
                    relative,
                    place,
                    entry.kind if entry else "",
                    entry.origin if entry else "measured",
                    entry.sha256 if entry else None,
                )
            )
    present = {file.path for file in found}
    skipped += [(entry.path, "in the index, but not in the run directory") for entry in view.evidence if entry.path not in present]
    known = present | {path for path, _ in skipped}
    for item in view.diagnosis.evidence[:_MOST_FILES] if view.diagnosis is not None else ():
        if item.path and item.path not in known:
            known.add(item.path)
            skipped.append((item.path, "the diagnosis rests on it, but it is not kept in the run directory: attach it yourself"))
    return found, skipped


def _texts_with_settings(files: Sequence[SourceFile]) -> Iterator[str]:
    """The beginnings of the evidence's texts: environments, command lines and log heads name the deadlines that were set."""
    for file in files[:200]:
        try:
            with file.place.open("rb") as stream:
                yield stream.read(_ENVIRONMENT_TEXT).replace(b"\0", b"\n").decode("utf-8", "replace")
        except OSError:
            continue


def _own_names() -> tuple[list[str], list[str]]:
    """(host names, user names) of this machine, without asking the network."""
    hosts = [name for name in (platform.node(), os.environ.get("HOSTNAME", "")) if name]
    users = [name for name in (os.environ.get("USER", ""), os.environ.get("LOGNAME", "")) if name]
    with contextlib.suppress(KeyError):  # a container without an entry for its user has no name to hide
        users.append(pwd.getpwuid(os.getuid()).pw_name)
    return hosts, users


def _folder_name(view: RunView) -> str:
    when = re.sub(r"[^0-9TZ]", "", view.run.started[:19]) or "undated"
    return clean_name(f"dsv4-{view.run.scenario}-{when}")


def _source(view: RunView) -> ReportSource:
    """What the reports are made from; of a run without a diagnosis only the record."""
    if view.diagnosis is not None:
        return report_source(view)
    from .verdicts import unfinished_diagnosis

    ground: Any = view.run.ground if view.run.ground in ("server", "gpu", "cpu") else "gpu"
    why = next((item.why for item in view.missing if item.what == paths.DIAGNOSIS), "it is missing")
    return ReportSource(
        diagnosis=unfinished_diagnosis(ground, f"the run has no diagnosis ({why})"),
        run=view.run.document(),
        title=view.run.scenario,
        version=__version__,
    )


def make_bundle(
    view: RunView,
    target: Path,
    *,
    keep: Sequence[str] = (),
    hide: Sequence[str] = (),
    raw: bool = False,
    max_bytes: int = DEFAULT_MAX,
    salt: bytes | None = None,
    clock: Clock = SYSTEM,
    environment: dict[str, Any] | None = None,
) -> Bundled:
    """Write the bundle of a run to ``target``, whole or not at all. ``salt``: of the pseudonyms; by default made and forgotten.

    Raises UsageError (``keep``), RunStoreError (does not fit, cannot be written).
    """
    try:
        kinds, texts = parse_keep(keep)
    except KeepError as error:
        raise UsageError(f"--keep: {error}", help_text="See docs/bundle.md for what can stay.") from error
    files, skipped = _evidence_files(view)
    hosts, users = _own_names()
    redactor = Redactor(salt or secrets.token_bytes(32), keep_kinds=kinds, keep_texts=texts, hosts=hosts, users=users, hide=hide)
    created = utc_stamp(clock)
    run = view.run.document()
    if environment is None:
        environment = environment_document(run, created=created, texts=_texts_with_settings(files), clock=clock)
    timeline = view.path / paths.TIMELINE
    index = {"schema": "dsv4-repro/evidence/1", "entries": [entry.model_dump(mode="json") for entry in view.evidence]}
    request = BundleRequest(
        source=_source(view),
        run=run,
        diagnosis=view.diagnosis.document() if view.diagnosis is not None else None,
        index=index,
        files=files,
        timeline=timeline if timeline.is_file() and not timeline.is_symlink() else None,
        environment=environment,
        name=_folder_name(view),
        version=__version__,
        created=created,
        max_bytes=max_bytes,
        raw=raw,
        keep=tuple(keep),
        not_here=skipped,
    )
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    work = Path(tempfile.mkdtemp(prefix="dsv4-repro-bundle-"))  # mkdtemp makes it private
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w+b") as out:
            done = write_bundle(request, redactor, work, out)
            out.flush()
            os.fsync(out.fileno())
            if out.seek(0, os.SEEK_END) > max_bytes:
                raise RunStoreError(f"the bundle is larger than {max_bytes} bytes", path=str(target), help_text="--max-size 50MB")
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, target, "write the bundle") from error
    finally:
        with contextlib.suppress(OSError):  # where nothing could be made, nothing can be removed
            temporary.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
    return done


# ---------------------------------------------------------------------------------------------------------------------------------
# The verb


def run_bundle(
    run: Path, common: Common, *, keep: Sequence[str], hide: Sequence[str], raw: bool, max_size: str, clock: Clock = SYSTEM
) -> int:
    """The verb; 0. ``--out``: the zip, or a directory for it; a file that is there
    is replaced only with ``--yes`` (RefusedError). ``--seed`` makes pseudonyms repeatable, and guessable."""
    screen = Screen(as_json=common.as_json)
    limit = parse_size(max_size)
    if any(len(text) < 2 for text in hide):  # an unset variable of a script: nothing would be hidden, and nobody told
        raise UsageError("--hide: an empty text, or one of a single character, cannot be hidden", help_text="--hide NAME")
    view = open_run(run)
    target = common.out or Path.cwd()
    if target.is_dir():
        target = target / f"{_folder_name(view)}.zip"
    if os.path.lexists(target) and not common.yes:
        raise RefusedError(f"{target} is there already", help_text="Replace it: --yes; or write elsewhere: --out FILE.zip")
    salt = hashlib.sha256(f"dsv4-repro bundle {common.seed}".encode()).digest() if common.seed is not None else None
    screen.progress(f"packing {run}")
    done = make_bundle(view, target, keep=keep, hide=hide, raw=raw, max_bytes=limit, salt=salt, clock=clock)
    screen.end_progress()
    screen.tell(bundle_lines(view, target, done, seeded=salt is not None))
    screen.document({**done.manifest, "path": str(target), "bytes": target.stat().st_size, "redaction": done.redaction})
    return 0


def bundle_lines(view: RunView, target: Path, done: Bundled, *, seeded: bool = False) -> list[str]:
    """What is said at the end: the file, what was replaced, what is not in it."""
    manifest = done.manifest
    lines = [f"bundle: {target} ({target.stat().st_size / 1e6:.2f} MB, {len(manifest['files'])} files)"]
    if view.diagnosis is not None:
        lines.append(f"{view.diagnosis.outcome}: {verdict_words(view.diagnosis)}")
    replaced = [
        f"{item['replaced']} x {item['what']} ({item['different_values']} different)" for item in done.redaction["replaced"]
    ]
    lines.append("replaced by pseudonyms: " + ("; ".join(replaced) if replaced else "nothing private was found"))
    if manifest["left_out"]:
        shown = [f"{item['path']} ({item['why']})" for item in manifest["left_out"][:6]]
        more = f" and {len(manifest['left_out']) - 6} more" if len(manifest["left_out"]) > 6 else ""
        lines.append("not in it: " + "; ".join(shown) + more)
    if manifest["cut"]:
        lines.append("cut to size: " + ", ".join(manifest["cut"][:8]))
    doubtful = [entry for entry in manifest["files"] if "--raw" in str(entry.get("note", "")) and entry.get("how") == "stripped"]
    lines += [f"{entry['path']}: {entry['note']}" for entry in doubtful]
    if manifest["raw"]:
        lines.append("--raw: core dumps and binary files went in as they are; they can hold prompts and anything else in memory")
    if seeded:
        lines.append("--seed: whoever knows the seed can test guesses against the pseudonyms; without it nobody can")
    lines.append("Nothing was sent anywhere. Look into redaction.json and the texts before you do.")
    return lines


# ---------------------------------------------------------------------------------------------------------------------------------
# The way back


def is_bundle(path: Path) -> bool:
    """Whether a file is a bundle: a zip whose manifest says so."""
    try:
        if head_of(path, 4) != b"PK\x03\x04":
            return False
        with zipfile.ZipFile(path) as archive:
            return _manifest_entry(archive) is not None
    except (EvidenceError, OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _manifest_entry(archive: zipfile.ZipFile) -> zipfile.ZipInfo | None:
    for info in archive.infolist()[:_MOST_ENTRIES]:
        if info.filename.count("/") == 1 and info.filename.endswith("/" + MANIFEST) and info.file_size < 32 << 20:
            try:
                document = json.loads(archive.read(info))
            except (ValueError, RuntimeError, zipfile.BadZipFile):
                continue
            if isinstance(document, dict) and document.get("schema") == BUNDLE_SCHEMA:
                return info
    return None


@contextmanager
def opened_bundle(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """(a private folder that is a run directory, what is wrong with the bundle) while the context is open.

    Nothing is written outside the folder: names that lead out, links and encrypted entries are refused, sizes are bounded.
    RunStoreError if it is no bundle or cannot be unpacked.
    """
    work = Path(tempfile.mkdtemp(prefix="dsv4-repro-bundle-"))
    try:
        try:
            with zipfile.ZipFile(path) as archive:
                marker = _manifest_entry(archive)
                if marker is None:
                    raise RunStoreError("no bundle: it holds no manifest of ours", path=str(path))
                root = marker.filename.partition("/")[0]
                problems = _unpack(archive, root, work)
        except (OSError, zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError) as error:
            raise RunStoreError(f"a damaged archive: {error}", path=str(path)) from error
        yield work, problems + _check(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(archive: zipfile.ZipFile, root: str, work: Path) -> list[str]:
    problems: list[str] = []
    total = 0
    entries = archive.infolist()
    if len(entries) > _MOST_ENTRIES:
        problems.append(f"only the first {_MOST_ENTRIES} of {len(entries)} entries were unpacked")
    for info in entries[:_MOST_ENTRIES]:
        name = info.filename
        parts = name.split("/")
        shown = ascii(name)[:120]
        if info.filename.endswith("/"):
            continue
        bad = parts[0] != root or len(parts) < 2 or any(part in ("", ".", "..") or part != clean_name(part) for part in parts)
        if bad or (info.external_attr >> 16) & 0o170000 not in (0, 0o100000) or info.flag_bits & 1:
            problems.append(f"{shown}: not unpacked (a name that leads out, a link, or encrypted)")
            continue
        total += info.file_size
        if total > _MOST_UNPACKED:
            raise RunStoreError(f"unpacks to more than {_MOST_UNPACKED} bytes", path=archive.filename or "", place=shown)
        target = work.joinpath(*parts[1:])
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as out, archive.open(info) as stream:
            left = info.file_size
            while left > 0 and (block := stream.read(min(left, 1 << 20))):
                out.write(block)
                left -= len(block)
    return problems


def _check(work: Path) -> list[str]:
    """What does not agree with the manifest."""
    manifest = read_json_file(work / MANIFEST)
    problems = []
    for entry in manifest.get("files") or ():
        if not isinstance(entry, dict):
            continue
        place = work.joinpath(*str(entry.get("path", "")).split("/"))
        if not place.is_file():
            problems.append(f"{ascii(entry.get('path'))[:120]}: in the manifest, but not in the archive")
            continue
        with place.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry.get("sha256"):
                problems.append(f"{ascii(entry.get('path'))[:120]}: was changed since the bundle was made")
    return problems
