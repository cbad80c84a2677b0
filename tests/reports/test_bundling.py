"""``bundle RUN`` from a run directory to an archive and back: nothing private, nothing missing without a word, the same verdict."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import socket
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import RefusedError, RunStoreError, UsageError
from dsv4_repro.forensics.autopsy import autopsy_paths
from dsv4_repro.forensics.records import Diagnosis, Evidence
from dsv4_repro.reports.bundle_records import RedactionReport
from dsv4_repro.repro.autopsy import autopsy_run
from dsv4_repro.repro.bundle_environment import deadlines, environment_document
from dsv4_repro.repro.bundling import is_bundle, make_bundle, opened_bundle, parse_size
from dsv4_repro.repro.cli import build
from dsv4_repro.repro.runread import open_run
from dsv4_repro.repro.schemas import schema_of
from dsv4_repro.repro.step_summary_file import append_step_summary

SALT = b"thirty-two bytes of salt for all"
ENVIRONMENT: dict[str, Any] = {"schema": "x", "where": {"hostname": "gpu-node-07", "topology": "GPU0 X NV18"}}


def bundled(run: Path, target: Path, **more: Any) -> Any:
    values: dict[str, Any] = {"salt": SALT, "clock": FakeClock(), "environment": ENVIRONMENT}
    return make_bundle(open_run(run), target, **{**values, **more})


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def packed(private_run: Path, tmp_path: Path) -> tuple[Path, Any]:
    target = tmp_path / "bundle.zip"
    return target, bundled(private_run, target)


# --- privacy ------------------------------------------------------------------------------------------------------------------


def test_nothing_private_is_anywhere_in_the_archive(packed: tuple[Path, Any], secrets: Any) -> None:
    files = contents(packed[0])
    everything = "\n".join([*files, *(data.decode("utf-8", "replace") for data in files.values())]).lower()
    for secret in secrets[0]:
        assert secret.lower() not in everything, secret


def test_what_the_verdict_needs_is_still_there(packed: tuple[Path, Any], secrets: Any) -> None:
    log = contents(packed[0])["evidence/hang-1/engine.log"].decode()
    for words in secrets[1]:
        assert words in log, words


def test_the_redaction_report_names_places_and_counts(packed: tuple[Path, Any], secrets: Any) -> None:
    report = json.loads(contents(packed[0])["redaction.json"])
    kinds = {item["kind"]: item for item in report["replaced"]}
    assert {"secrets", "prompts", "users", "hosts", "ips", "macs"} <= set(kinds)
    assert all(item["replaced"] == sum(place["count"] for place in item["places"]) for item in report["replaced"])
    places = {place["file"] for place in kinds["secrets"]["places"]}
    assert "evidence/hang-1/engine.log" in places
    assert "run.json#environment.hf_token" in places
    numbers = next(p["lines"] for p in kinds["hosts"]["places"] if p["rule"] == "NCCL host")
    assert numbers == [6, 7]


def test_hosts_and_ranks_correlate_across_files(packed: tuple[Path, Any]) -> None:
    files = contents(packed[0])
    run = json.loads(files["run.json"])
    name = run["environment"]["hostname"]
    assert name.startswith("host-")
    assert name in files["evidence/hang-1/engine.log"].decode()
    assert name in run["command"][-3]
    assert name == json.loads(files["evidence/hang-1/gpu.json"])["hostname"]
    assert name in files["diagnosis.json"].decode()


def test_hashes_of_the_unredacted_files_are_nowhere(private_run: Path, packed: tuple[Path, Any]) -> None:
    """With the old hash anybody could test guesses of what was replaced."""
    everything = b"\n".join(contents(packed[0]).values()).decode("utf-8", "replace")
    for path in (private_run / "evidence").rglob("*"):
        if path.is_file() and path.name in ("engine.log", "host_stacks.txt", "gpu.json", "gpu.nvcudmp"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() not in everything, path


def test_two_bundles_of_one_run_share_no_pseudonym_and_one_salt_gives_the_same_bytes(private_run: Path, tmp_path: Path) -> None:
    for name, salt in (("a", SALT), ("b", SALT), ("c", b"another salt, as long as it must")):
        bundled(private_run, tmp_path / name, salt=salt)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    first, other = (json.loads(contents(tmp_path / name)["run.json"])["environment"]["hostname"] for name in ("a", "c"))
    assert first != other


def test_keep_and_hide(private_run: Path, tmp_path: Path) -> None:
    bundled(private_run, tmp_path / "k", keep=["hosts", "text:10.11.12.13"], hide=["push_back"])
    everything = b"\n".join(contents(tmp_path / "k").values()).decode("utf-8", "replace")
    assert "gpu-node-07" in everything
    assert "10.11.12.13" in everything
    assert "10.11.12.14" not in everything
    assert "push_back" not in everything
    assert "alice" not in everything
    assert json.loads(contents(tmp_path / "k")["redaction.json"])["kept_on_request"] == ["hosts", "text:10.11.12.13"]
    with pytest.raises(UsageError, match="never stay"):
        bundled(private_run, tmp_path / "s", keep=["secrets"])


def test_nothing_leaves_the_machine(private_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_more: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    make_bundle(open_run(private_run), tmp_path / "b.zip", salt=SALT)


# --- what is in it ------------------------------------------------------------------------------------------------------------


def test_the_manifest_lists_every_file_with_its_hash_and_the_sums_agree(packed: tuple[Path, Any]) -> None:
    files = contents(packed[0])
    manifest = json.loads(files["manifest.json"])
    assert {entry["path"] for entry in manifest["files"]} == set(files) - {
        "manifest.json",
        "redaction.json",
        "README.txt",
        "SHA256SUMS",
    }
    for entry in manifest["files"]:
        assert entry["sha256"] == hashlib.sha256(files[entry["path"]]).hexdigest()
        assert entry["size"] == len(files[entry["path"]])
    for line in files["SHA256SUMS"].decode().splitlines():
        digest, _, name = line.partition("  ")
        assert digest == hashlib.sha256(files[name]).hexdigest()
    assert manifest["verdict"]["cause"] == "peer-left"
    assert [item["path"] for item in manifest["left_out"]] == ["evidence/hang-1/strange.bin"]


def test_index_diagnosis_and_timeline_name_the_files_as_they_are_here(packed: tuple[Path, Any]) -> None:
    files = contents(packed[0])
    index = json.loads(files["evidence/index.json"])
    for entry in index["entries"]:
        assert entry["sha256"] == hashlib.sha256(files[entry["path"]]).hexdigest()
    diagnosis = json.loads(files["diagnosis.json"])
    listed = {entry["sha256"] for entry in index["entries"]}
    assert {item["sha256"] for item in diagnosis["evidence"]} == listed
    artefacts = [json.loads(line) for line in files["timeline.jsonl"].splitlines() if b'"artefact"' in line]
    assert {line["sha256"] for line in artefacts} == listed
    Diagnosis.model_validate(diagnosis)


def test_the_reports_are_of_the_redacted_diagnosis_and_show_stacks_and_time(packed: tuple[Path, Any]) -> None:
    page = contents(packed[0])["report.html"].decode()
    for words in ("peer-left", "WorkerAsyncOutputCopy", "Timeline", "host-", "worker_busy_loop"):
        assert words in page, words


def test_core_dumps_are_stripped_and_raw_ones_only_on_demand(private_run: Path, tmp_path: Path) -> None:
    plain, raw = tmp_path / "plain.zip", tmp_path / "raw.zip"
    bundled(private_run, plain)
    bundled(private_run, raw, raw=True)
    dump = (private_run / "evidence/hang-1/gpu.nvcudmp").read_bytes()
    assert dump not in contents(plain).values()
    names = set(contents(plain))
    assert {f"evidence/hang-1/gpu.nvcudmp{end}" for end in ("", ".tables.json", ".kernel-1.cubin")} <= names
    assert contents(raw)["raw/evidence/hang-1/gpu.nvcudmp"] == dump
    assert "evidence/hang-1/strange.bin" in contents(raw)
    note = next(entry["note"] for entry in json.loads(contents(plain)["manifest.json"])["files"] if entry["how"] == "stripped")
    assert "gives the same verdict as the whole dump" in note


def test_compressed_and_packed_evidence_is_opened_and_redacted(new_run: Callable[..., Path], tmp_path: Path) -> None:
    run = new_run()
    place = run / "evidence" / "more"
    place.mkdir()
    (place / "old.log.gz").write_bytes(gzip.compress(b"USER=alice on node gpu-node-07\n"))
    with tarfile.open(place / "logs.tar", "w") as archive:
        for name, data in (("a/alice.log", b"alice again 10.11.12.13\n"), ("../../escape.log", b"alice out\n")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    bundled(run, tmp_path / "b.zip")
    files = contents(tmp_path / "b.zip")
    assert b"USER=user-" in files["evidence/more/old.log"]
    inside = [name for name in files if name.startswith("evidence/more/logs.tar/")]
    assert len(inside) == 2
    assert not any("alice" in name or ".." in name for name in files)
    assert not any(b"alice" in data for data in files.values())
    left_out = {item["path"]: item["why"] for item in json.loads(files["manifest.json"])["left_out"]}
    assert any("link" in why for why in left_out.values())


def test_entries_are_private_sorted_and_undated_and_so_is_the_file(packed: tuple[Path, Any]) -> None:
    assert stat.S_IMODE(packed[0].stat().st_mode) == 0o600
    with zipfile.ZipFile(packed[0]) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {name.partition("/")[0] for name in names} == {"dsv4-drain-20261129T140500"}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100600}
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_links_and_pipes_in_the_evidence_are_not_followed(new_run: Callable[..., Path], tmp_path: Path) -> None:
    run = new_run()
    (tmp_path / "outside.txt").write_text("outside")
    (run / "evidence" / "link.txt").symlink_to(tmp_path / "outside.txt")
    os.mkfifo(run / "evidence" / "pipe")
    bundled(run, tmp_path / "b.zip")
    files = contents(tmp_path / "b.zip")
    assert b"outside" not in b"".join(files.values())
    whys = {item["path"]: item["why"] for item in json.loads(files["manifest.json"])["left_out"]}
    assert whys["evidence/link.txt"] == "a link: not followed"
    assert whys["evidence/pipe"] == "not a regular file"


# --- size ---------------------------------------------------------------------------------------------------------------------


def test_a_small_limit_cuts_logs_around_what_is_cited_and_says_so(new_run: Callable[..., Path], tmp_path: Path) -> None:
    import random

    rolled = random.Random(7)
    noise = "".join(f"INFO line {n} {rolled.getrandbits(200):x}\n" for n in range(40_000))
    run = new_run(log=noise + "the cited line\n" + noise)
    made = json.loads((run / "diagnosis.json").read_text())
    made["decisive"][0]["lines"][0] |= {"first": 40_001, "last": 40_001, "source": "engine.log"}
    (run / "diagnosis.json").write_text(json.dumps(made))
    target = tmp_path / "b.zip"
    done = bundled(run, target, max_bytes=800_000)
    assert target.stat().st_size <= 800_000
    files = contents(target)
    assert "evidence/hang-1/engine.log" in done.manifest["cut"]
    log = files["evidence/hang-1/engine.log"].decode()
    assert "the cited line" in log
    assert "were left out of this bundle" in log
    assert {"manifest.json", "report.md", "diagnosis.json", "run.json"} <= set(files)


@pytest.mark.parametrize("limit", [150_000, 200_000, 300_000, 1_000_000])
def test_whatever_the_limit_the_archive_is_below_it(private_run: Path, tmp_path: Path, limit: int) -> None:
    bundled(private_run, tmp_path / "b.zip", max_bytes=limit)
    assert (tmp_path / "b.zip").stat().st_size <= limit
    manifest = json.loads(contents(tmp_path / "b.zip")["manifest.json"])
    names = {entry["path"] for entry in manifest["files"]} | {item["path"] for item in manifest["left_out"]}
    assert {"evidence/hang-1/engine.log", "evidence/hang-1/gpu.nvcudmp"} <= names


def test_a_limit_below_the_records_is_an_error_and_leaves_nothing(private_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "b.zip"
    target.parent.mkdir()
    with pytest.raises(RunStoreError, match="alone take"):
        bundled(private_run, target, max_bytes=70_000)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"), [("25MB", 25_000_000), ("10MiB", 10 << 20), ("1.5 GB", 1_500_000_000), ("200000", 200_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "10", "-5MB", "5XB", "1e9"])
def test_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


# --- bad input ----------------------------------------------------------------------------------------------------------------

HOSTILE = (
    b"\x1b]0;title\x07\x1b[2J\x00\xff\xfe<script>alert(1)</script> | `x` ](http://evil) \x80\x81\n"
    + b"no end of line " * 100
    + b"\n" * 50
    + bytes(range(256))
)


def test_a_run_full_of_hostile_texts_is_packed_and_rendered(new_run: Callable[..., Path], made: Any, tmp_path: Path) -> None:
    evil = made.evil
    run = new_run(
        diagnosis=made.hang(
            next=evil, evidence=(), chain=(), unread=(), unwedge=evil, timing=[evil], trials=evil, decisive=evil, inputs=evil
        )
    )
    place = run / "evidence" / "hang-1"
    (place / "hostile.log").write_bytes(HOSTILE * 20)
    (place / "long.log").write_bytes(b"x" * (20 << 20))
    (place / "deep.json").write_bytes(b"[" * 100_000)
    (place / "nan.json").write_bytes(b'{"a": NaN, "b": 1e999, "c": "\\ud800", "prompt": "\\ud800 private words"}')
    (place / "empty.txt").write_bytes(b"")
    (place / "name with \x1b[31m & <b>'.txt").write_bytes(b"x")
    with (run / "timeline.jsonl").open("ab") as stream:
        stream.write(
            b'\xff\xfe not json\n{"t": 1e999, "kind": 7}\n' + json.dumps({"t": 3, "kind": evil, "text": evil}).encode() + b"\n"
        )
    target = tmp_path / "b.zip"
    bundled(run, target)
    files = contents(target)
    page = files["report.html"].decode()
    assert "<script>" not in page
    assert "\x1b" not in page
    assert len(files["evidence/hang-1/long.log"]) < 1 << 20
    assert b"private words" not in b"".join(files.values())
    assert all(name.isprintable() and " " not in name and "<" not in name for name in files)
    assert b"\x1b" not in files["evidence/hang-1/hostile.log"]
    json.loads(files["manifest.json"])


def test_a_run_that_was_killed_is_packed_without_a_diagnosis(new_run: Callable[..., Path], tmp_path: Path) -> None:
    run = new_run()
    for name in ("diagnosis.json", "timeline.jsonl", "evidence/index.json"):
        (run / name).unlink()
    bundled(run, tmp_path / "b.zip")
    files = contents(tmp_path / "b.zip")
    assert "diagnosis.json" not in files
    assert "evidence/hang-1/engine.log" in files
    assert "alice" not in b"".join(files.values()).decode("utf-8", "replace")
    assert json.loads(files["manifest.json"])["verdict"] is None


# --- the way back -------------------------------------------------------------------------------------------------------------


def verdict(diagnosis: Diagnosis) -> tuple[Any, ...]:
    v = diagnosis.verdict
    return (
        v.class_,
        v.cause,
        v.confidence,
        v.signature,
        v.identity,
        [(w.block, w.value, w.target, w.pc_offset) for w in diagnosis.waits],
    )


def test_a_bundle_gives_the_verdict_of_its_run(private_run: Path, packed: tuple[Path, Any]) -> None:
    with opened_bundle(packed[0]) as (folder, problems):
        assert problems == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert verdict(autopsy_run(folder)) == verdict(autopsy_run(private_run))
    assert not folder.exists()


def test_as_plain_evidence_the_archive_gives_the_verdict_of_the_folder(private_run: Path, packed: tuple[Path, Any]) -> None:
    before, after = autopsy_paths([private_run]).diagnosis, autopsy_paths([packed[0]]).diagnosis
    assert verdict(before) == verdict(after)
    assert before.verdict.cause == "peer-left"


def test_it_is_told_from_other_archives(packed: tuple[Path, Any], tmp_path: Path) -> None:
    assert is_bundle(packed[0])
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/manifest.json", "{}")
    text = tmp_path / "text"
    text.write_text("PK\x03\x04 no")
    for path in (other, text, tmp_path / "missing", tmp_path):
        assert not is_bundle(path)
    with pytest.raises(RunStoreError), opened_bundle(other):
        pass


def test_a_bundle_that_was_tampered_with_says_so(packed: tuple[Path, Any], tmp_path: Path) -> None:
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(packed[0]) as archive, zipfile.ZipFile(changed, "w") as out:
        for info in archive.infolist():
            if info.filename.endswith("host_stacks.txt"):
                continue
            data = archive.read(info)
            out.writestr(info, data + b"more" if info.filename.endswith("engine.log") else data)
    with opened_bundle(changed) as (_, problems):
        assert sorted(text.rpartition(": ")[2] for text in problems) == [
            "in the manifest, but not in the archive",
            "was changed since the bundle was made",
        ]


@pytest.mark.parametrize(
    "name", ["{root}/../../escape", "/etc/escape", "{root}/a/../b", "other/file", "{root}/a\\b", "{root}/.hidden", "{root}//x"]
)
def test_no_name_leads_out(packed: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    evil = tmp_path / "evil.zip"
    with zipfile.ZipFile(packed[0]) as archive, zipfile.ZipFile(evil, "w") as out:
        root = archive.namelist()[0].partition("/")[0]
        for info in archive.infolist():
            out.writestr(info, archive.read(info))
        out.writestr(name.format(root=root), b"escaped")
    before = set(tmp_path.rglob("*"))
    with opened_bundle(evil) as (folder, problems):
        assert len(problems) == 1
        assert "not unpacked" in problems[0]
        assert not any(path.read_bytes() == b"escaped" for path in folder.rglob("*") if path.is_file())
    assert set(tmp_path.rglob("*")) == before


def test_an_entry_without_a_name_costs_nobody_else(packed: tuple[Path, Any], tmp_path: Path) -> None:
    raw = bytearray(packed[0].read_bytes())
    entry = raw.index(b"PK\x01\x02")
    length = raw[entry + 28]
    raw[entry + 28], raw[entry + 32] = 0, length  # the name becomes a comment
    (tmp_path / "nameless.zip").write_bytes(raw)
    with opened_bundle(tmp_path / "nameless.zip") as (folder, problems):
        assert any("not unpacked" in text for text in problems)
        assert (folder / "run.json").is_file()


def test_a_link_in_a_bundle_is_not_made(packed: tuple[Path, Any], tmp_path: Path) -> None:
    evil = tmp_path / "evil.zip"
    with zipfile.ZipFile(packed[0]) as archive, zipfile.ZipFile(evil, "w") as out:
        root = archive.namelist()[0].partition("/")[0]
        for info in archive.infolist():
            out.writestr(info, archive.read(info))
        link = zipfile.ZipInfo(f"{root}/evidence/passwd")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        out.writestr(link, "/etc/passwd")
    with opened_bundle(evil) as (folder, problems):
        assert len(problems) == 1
        assert not any(path.is_symlink() for path in folder.rglob("*"))


# --- the verb -----------------------------------------------------------------------------------------------------------------


def test_the_verb_writes_says_and_returns(private_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.zip"
    status = build().main(
        ["bundle", str(private_run), "--out", str(target), "--json", "--seed", "5", "--max-size", "2MB"], standalone_mode=False
    )
    assert status == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "dsv4-repro/bundle/1"
    assert document["path"] == str(target)
    assert document["bytes"] == target.stat().st_size
    assert "replaced by pseudonyms" in err
    assert "Nothing was sent anywhere" in err
    assert "can test guesses" in err
    for word in ("alice", "gpu-node-07", "sup3rs3cret"):
        assert word not in err.replace(str(tmp_path), "")
    environment = json.loads(contents(target)["environment.json"])
    assert {row["deadline"] for row in environment["deadlines"]} >= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"}


@pytest.mark.parametrize("named", [True, False])
def test_an_archive_that_is_there_is_replaced_only_with_consent(
    named: bool, private_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    target = here / ("mine.zip" if named else "dsv4-drain-20261129T140500.zip")
    target.write_bytes(b"somebody's")
    words = ["bundle", str(private_run), *(["--out", str(target)] if named else [])]
    with pytest.raises(RefusedError, match=target.name) as told:
        build().main(words, standalone_mode=False)
    assert "--yes" in told.value.help_text
    assert [path.name for path in here.iterdir()] == [target.name]
    assert target.read_bytes() == b"somebody's"
    assert build().main([*words, "--yes"], standalone_mode=False) == 0
    assert is_bundle(target)


def test_the_default_place_is_here_and_named_after_the_run(
    private_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert build().main(["bundle", str(private_run)], standalone_mode=False) == 0
    assert [path.name for path in here.iterdir()] == ["dsv4-drain-20261129T140500.zip"]


def test_the_documents_follow_their_published_schemas(packed: tuple[Path, Any]) -> None:
    manifest, redaction = (json.loads(contents(packed[0])[name]) for name in ("manifest.json", "redaction.json"))
    schema = schema_of("bundle")
    jsonschema.validate(manifest, schema)
    jsonschema.validate({**manifest, "path": "x", "bytes": 1, "redaction": redaction}, schema)
    assert RedactionReport.model_validate(redaction).replaced


def test_autopsy_takes_a_bundle_and_names_what_was_changed_in_it(
    packed: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build().main(["autopsy", str(packed[0]), "--json"], standalone_mode=False) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"]["cause"], document["ground"]) == ("peer-left", "gpu")
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(packed[0]) as archive, zipfile.ZipFile(changed, "w") as out:
        for info in archive.infolist():
            data = archive.read(info)
            out.writestr(info, data + b"more" if info.filename.endswith("engine.log") else data)
    assert build().main(["autopsy", str(changed), "--json"], standalone_mode=False) == 3
    document = json.loads(capsys.readouterr().out)
    assert any("was changed since the bundle was made" in item["why"] for item in document["unread"])


def test_a_runner_gets_its_summary_and_nobody_else(made: Any, tmp_path: Path) -> None:
    assert append_step_summary(made.source(), {}) is None
    target = tmp_path / "summary.md"
    target.write_text("before\n")
    assert append_step_summary(made.source(), {"GITHUB_STEP_SUMMARY": str(target)}) == target
    assert target.read_text().startswith("before\n### ❌")
    target.write_bytes(b"x" * (1 << 20))
    assert append_step_summary(made.source(), {"GITHUB_STEP_SUMMARY": str(target)}) is None
    assert append_step_summary(made.source(), {"GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "where")}) is None


def test_report_renders_stacks_and_timeline_of_a_run(private_run: Path, tmp_path: Path) -> None:
    assert build().main(["report", str(private_run)], standalone_mode=False) == 0
    page = (private_run / "report.html").read_text()
    assert "WorkerAsyncOutputCopy" in page
    assert "Decode steps done" in page
    assert "WorkerAsyncOutputCopy" in (private_run / "report.md").read_text()


def test_names_at_the_end_of_a_huge_log_are_learned_and_gone(
    new_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of a text is what names are learned from, wherever in the text it lies, packed or not."""
    from dsv4_repro.reports import bundle_files
    from dsv4_repro.reports.bundle_text import Cut

    monkeypatch.setattr(bundle_files, "_LARGE", 20_000)
    monkeypatch.setattr(bundle_files, "_FIRST_CUT", Cut(2_000, 8_000))
    run = new_run()
    text = "".join(f"line {n} of a long log\n" for n in range(20_000)) + "Nov 29 14:05:03 zeta-77 vllm[1]: x\nzeta-77 alone\n"
    (run / "evidence" / "long.log").write_text(text)
    (run / "evidence" / "packed.log.gz").write_bytes(gzip.compress(text.encode()))
    done = bundled(run, tmp_path / "b.zip")
    files = contents(tmp_path / "b.zip")
    for name in ("evidence/long.log", "evidence/packed.log"):
        kept = files[name].decode()
        assert "zeta-77" not in kept
        assert "were left out of this bundle" in kept
        assert kept.startswith("line 0 of")
        assert kept.rstrip().endswith("alone")
        assert name in done.manifest["cut"]


def test_evidence_that_lies_elsewhere_is_named(new_run: Callable[..., Path], made: Any, tmp_path: Path) -> None:
    elsewhere = Evidence(id="e1", kind="engine log", path="/home/alice/incident/engine.log", sha256="ef" * 32)
    run = new_run(diagnosis=made.hang(evidence=(elsewhere,), chain=()))
    done = bundled(run, tmp_path / "b.zip")
    (entry,) = [item for item in done.manifest["left_out"] if item["path"].endswith("incident/engine.log")]
    assert "attach it yourself" in entry["why"]
    everything = b"\n".join(contents(tmp_path / "b.zip").values()).decode("utf-8", "replace")
    assert "alice" not in everything
    assert "ef" * 32 not in everything


def test_deadlines_say_whether_they_were_read_or_are_defaults() -> None:
    run = {"command": ["dsv4-repro", "run", "drain", "--timeout", "90"]}
    rows = {
        row["deadline"]: row
        for row in deadlines(run, ["x VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800 y", '"VLLM_RINGBUFFER_WARNING_INTERVAL": "10"'])
    }
    assert (rows["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]["value"], rows["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]["known"]) == (
        "1800",
        "read in the evidence",
    )
    assert rows["VLLM_RINGBUFFER_WARNING_INTERVAL"]["value"] == "10"
    assert rows["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]["known"] == "default, not read"
    assert rows["--timeout"]["value"] == "90 s"


def test_the_environment_keeps_the_runs_and_the_bundlers_machine_apart(private_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "never-written")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    document = environment_document(open_run(private_run).run.document(), created="now")
    assert document["recorded_with_the_run"]["environment"]["device"] == "NVIDIA H200"
    here = document["where_the_bundle_was_made"]
    assert "need not be the machine" in here["note"]
    assert here["variables"]["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "never-written" not in json.dumps(document)
    assert {"memory.max", "cpus", "ptrace_scope", "limits_soft_hard", "shm_bytes"} <= set(here["limits"])
    assert isinstance(here["topology"], str)
