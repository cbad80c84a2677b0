"""From paths to the diagnosis document."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import jsonschema
import pytest

from dsv4_repro.forensics.autopsy import AutopsyResult, autopsy_case, autopsy_paths
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.records import Diagnosis

CASES = Path(__file__).parent.parent / "cases"
PEER = CASES / "a01-peer-left-two-ranks.txt"


def evidence(path: Path) -> str:
    lines = path.read_text("utf-8").split("\n")[1:]
    return "\n".join(line for line in lines if not line.startswith("# ") or line.startswith(("# HELP", "# TYPE")))


def split_to_files(text: str, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    body: list[str] = []
    name = "head"
    for line in [*text.split("\n"), "=== end ==="]:
        if line.startswith("=== ") and line.endswith(" ==="):
            if any(part.strip() for part in body):
                path = folder / f"{len(files)}-{name}.txt"
                path.write_text("\n".join(body))
                files.append(path)
            name, body = "".join(ch if ch.isalnum() or ch in "- ." else "_" for ch in line.strip("= "))[:80], []
        else:
            body.append(line)
    return files


def words(result: AutopsyResult) -> tuple[str, str | None, str, str | None]:
    verdict = result.diagnosis.verdict
    return verdict.class_, verdict.cause, verdict.confidence, verdict.signature


@pytest.mark.parametrize("path", sorted(CASES.glob("*.txt")), ids=lambda p: p.stem)
def test_the_document_is_valid_and_says_what_it_used(path: Path) -> None:
    result = autopsy_case(read_text(path.name, evidence(path)))
    document = json.loads(json.dumps(result.diagnosis.document()))
    jsonschema.validate(document, Diagnosis.model_json_schema(by_alias=True))
    assert Diagnosis.model_validate(document).verdict == result.diagnosis.verdict
    if document["verdict"]["class"] != "unknown":
        assert document["decisive"]
        for finding in document["decisive"]:
            for line in finding["lines"]:
                assert line["source"]
                assert line["first"] <= line["last"]
    ids = {item["id"] for item in document["evidence"]}
    cited = [line["evidence"] for f in document["rules"] for line in f["lines"]]
    assert set(cited) - {None} <= ids
    assert None not in cited
    assert document["inputs"]
    if document["verdict"]["confidence"] != "high" and document["verdict"]["class"] in ("unknown", "gpu-kernel-stuck"):
        assert document["alternatives"]


def test_one_text_or_a_folder_of_files_or_an_archive_judge_alike(tmp_path: Path) -> None:
    for path in (PEER, CASES / "a13-late-rank-compiles.txt", CASES / "a18-ipc-both-ends.txt", CASES / "a22-kv-transfer.txt"):
        text = evidence(path)
        whole = words(autopsy_case(read_text("one.txt", text)))
        folder = tmp_path / path.stem
        files = split_to_files(text, folder)
        assert words(autopsy_paths([folder])) == whole
        assert words(autopsy_paths(files)) == whole
        with tarfile.open(tmp_path / f"{path.stem}.tar.gz", "w:gz") as archive:
            archive.add(folder, "incident")
        assert words(autopsy_paths([tmp_path / f"{path.stem}.tar.gz"])) == whole
        with zipfile.ZipFile(tmp_path / f"{path.stem}.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
            for file in files:
                zipped.write(file, f"incident/{file.name}.gz" if file.name.endswith("gz") else f"incident/{file.name}")
        assert words(autopsy_paths([tmp_path / f"{path.stem}.zip"])) == whole
        (tmp_path / "one.txt.gz").write_bytes(gzip.compress(text.encode()))
        assert words(autopsy_paths([tmp_path / "one.txt.gz"])) == whole


def test_the_dump_alone_predicts_the_trigger() -> None:
    result = autopsy_case(read_text("log", evidence(CASES / "a35-only-the-line.txt")))
    window = result.diagnosis.window
    assert (window.live_requests, window.rows, window.graph_rows, window.padded_requests, window.reached) == (3, 6, 8, 1, True)
    assert "3 x 2 = 6 rows in a graph of 8" in result.diagnosis.verdict.sentence
    chain = {link.link: link for link in result.diagnosis.chain}
    assert chain["graph-padding"].status == "inferred"
    assert chain["mtp"].status == "measured"
    assert chain["mtp"].evidence


def test_waits_ledger_and_chain_of_a_barrier() -> None:
    result = autopsy_case(read_text("x", evidence(PEER)))
    diagnosis = result.diagnosis
    assert {(w.value, w.target, w.comparison) for w in diagnosis.waits} == {(1, 4, ">=")}
    assert diagnosis.waits[0].block == (20, 0, 0)
    assert diagnosis.ledger
    assert all(
        sum(len(group) for group in (g.running, g.spinning, g.exited, g.never_started, g.unknown)) == 4 for g in diagnosis.ledger
    )
    assert {link.link for link in diagnosis.chain} >= {"dispatch", "barrier", "host"}


def test_the_timeline_is_on_one_axis() -> None:
    result = autopsy_case(read_text("x", evidence(PEER)))
    line = (result.diagnosis.model_extra or {})["timeline"]
    assert any("UTC+8" in note for note in line["axis"])
    assert line["series"]["generation tokens/s"][0][1] == 188.3
    placed = [e.seconds for e in result.timeline if e.seconds is not None]
    assert placed == sorted(placed)
    # The reading of nvidia-smi in local time lies after the waiting line that a UTC prefix places.
    smi = line["series"]["GPU 0 busy %"][0][0]
    assert 0 < smi - placed[-1] < 30


def test_unread_is_never_empty_when_tools_were_refused() -> None:
    text = (
        "=== py-spy ===\nError: Failed to get process: Operation not permitted (os error 1)\n"
        "=== cuda-gdb ===\nptrace: Operation not permitted.\nNo CUDA kernels.\n"
    )
    result = autopsy_case(read_text("x", text))
    assert {item.what for item in result.diagnosis.unread} >= {"host stacks", "device state"}
    assert all(item.remedy for item in result.diagnosis.unread)
    assert result.diagnosis.verdict.class_ == "unknown"


def run_directory(folder: Path, document: dict[str, object], **files: str) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text('{"schema": "dsv4-repro/run/1"}')
    (folder / "diagnosis.json").write_text(json.dumps(document))
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def earlier() -> dict[str, object]:
    return autopsy_case(read_text("x", evidence(PEER))).diagnosis.document()


def test_an_earlier_diagnosis_is_kept_where_the_artefacts_say_less(tmp_path: Path) -> None:
    result = autopsy_paths([run_directory(tmp_path / "run", earlier())])
    assert words(result) == ("gpu-spin-barrier", "peer-left", "high", "vllm-51593")
    assert result.diagnosis.waits
    assert result.diagnosis.ledger
    assert result.diagnosis.verdict.identity == earlier()["verdict"]["identity"]  # type: ignore[index]
    assert any(f["rule"] == "earlier-diagnosis" for f in (result.diagnosis.model_extra or {})["decisive"])


def test_an_earlier_diagnosis_that_is_contradicted_is_named_not_believed(tmp_path: Path) -> None:
    log = (
        "(EngineCore pid=7) ERROR 07-08 07:00:40 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: 1), "
        "shutting down executor.\n"
    )
    result = autopsy_paths([run_directory(tmp_path / "run", earlier(), log=log)])
    assert result.diagnosis.verdict.class_ == "worker-dead"
    assert any(f["rule"] == "earlier-diagnosis" for f in (result.diagnosis.model_extra or {})["contradicting"])


def test_a_broken_earlier_diagnosis_is_unread(tmp_path: Path) -> None:
    document = earlier()
    document["verdict"] = {"class": "gpu-hungry"}
    result = autopsy_paths([run_directory(tmp_path / "run", document)])
    assert result.diagnosis.verdict.class_ == "unknown"
    assert any("diagnosis" in item.what for item in result.diagnosis.unread)


def test_the_document_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    for name in ("a01-peer-left-two-ranks.txt", "a05-phase-wait.txt", "a10-desync-json.txt", "a12-collective-stuck-transport.txt"):
        (tmp_path / name).write_text(evidence(CASES / name))
    program = (
        "import json, sys; from pathlib import Path; from dsv4_repro.forensics.autopsy import autopsy_paths; "
        "print(json.dumps([autopsy_paths([p]).diagnosis.document() for p in sorted(Path(sys.argv[1]).iterdir())]))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


def test_several_incidents_of_one_kind_in_one_folder_stay_deterministic(tmp_path: Path) -> None:
    for name in ("a05-phase-wait.txt", "a09-kernel-stuck-one-gpu.txt"):
        (tmp_path / name).write_text(evidence(CASES / name))
    first = autopsy_paths([tmp_path]).diagnosis.document()
    second = autopsy_paths([tmp_path]).diagnosis.document()
    assert first == second


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.md", "# [Bug]: x\n\n### Your current environment\n\ndsv4-repro 0.1.0\n\n```text\n{}\n```\n"),
        ("report.html", "<!DOCTYPE html>\n<html><pre>{}</pre></html>\n"),
        ("junit.xml", '<?xml version="1.0"?>\n<testsuites><failure>{}</failure></testsuites>\n'),
        ("run.json", '{{\n  "schema": "dsv4-repro/run/1",\n  "log": "{}"\n}}\n'),
        ("timeline.jsonl", '{{"t": 0.1, "at": "2026-11-29T16:12:29.990Z", "kind": "log", "message": "{}"}}\n'),
    ],
)
def test_a_retelling_is_no_second_witness(tmp_path: Path, name: str, text: str) -> None:
    quoted = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, name=VLLM::Worker, GPU has fallen off the bus."
    (tmp_path / name).write_text(text.format(quoted))
    result = autopsy_paths([tmp_path])
    assert result.diagnosis.verdict.class_ == "unknown"
    assert "not evidence" in result.inputs[0].note
