"""autopsy: what is it, who reads it, and the same verdict wherever the evidence lies."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import EvidenceError, RunStoreError
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.repro import unpack
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.run_records import RunRecord
from dsv4_repro.repro.runread import open_run
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.repro.unpack import head_of, peek, plain_file

_NAME = "persistent_topk_kernel<512, 4u>(PersistentTopKParams)"
_MANGLED = "_Z22persistent_topk_kernelILi512ELj4EEv20PersistentTopKParams"
_CODE = (
    (0x500, "MOV R4,R6"),
    (0x510, "MOV R5,R7"),
    (0x520, "LDG.E.STRONG.GPU R4,desc[UR4][R4.64+0xc08]"),
    (0x530, "CCTL.IVALL"),
    (0x540, "ISETP.GE.AND P0,PT,R4,R9,PT"),
    (0x550, "@!P0 BRA 0x7f0000010500"),
    (0x560, "BAR.SYNC.DEFER_BLOCKING 0x0"),
    (0x570, "NOP"),
)


def transcript() -> str:
    """A session as cuda-gdb prints it: one resident block, lane 0 at the poll, the other warps at the barrier behind it."""
    base, pc = 0x7F0000010000, 0x530
    warps = [f"*  0        0x00000001           0xfffffffe 0x{base + pc:016x}      0 (12,0,0)                (0,0,0) "]
    warps += [
        f"  {warp:2}        0xffffffff           0x00000000 0x{base + 0x570:016x}      0 (12,0,0)              ({32 * warp},0,0) "
        for warp in range(1, 32)
    ]
    code = [f"{'=>' if offset == pc else '  '} {base + offset:#x} <{_MANGLED}+{offset}>:\t{text}" for offset, text in _CODE]
    values = {0: 0x400, 1: 0xFFFB80, 4: 1, 5: 0x7F00, 6: 0x20004860, 7: 0x7F00, 9: 2}
    registers = [f"R{number:<14}{values.get(number, 0):<#18x} {values.get(number, 0)}" for number in range(32)]
    lines = [
        "[Switching focus to CUDA kernel 0, grid 5, block (12,0,0), thread (0,0,0), device 0, sm 8, warp 0, lane 0]",
        "  Dev PCI Bus/Dev ID        Name Description SM Type SMs Warps/SM Lanes/Warp Max Regs/Lane    Active SMs Mask ",
        "*   0        00:06.0 NVIDIA H200   GH100GL-A   sm_90 132       64         32           255 0x0000000000000100 ",
        "  Kernel Parent Dev Grid Status                             SMs Mask  GridDim   BlockDim Invocation ",
        f"*      0      -   0    5 Active 0x0000000000000100 (16,1,1) (1024,1,1) {_NAME} ",
        "  BlockIdx To BlockIdx Count   State ",
        "Kernel 0",
        "* (12,0,0)    (12,0,0)     1 running ",
        "  Wp Active Lanes Mask Divergent Lanes Mask          Active PC Kernel BlockIdx First Active ThreadIdx ",
        "Device 0 SM 8",
        *warps,
        f"#0  {base + pc:#018x} in {_NAME}<<<(16,1,1),(1024,1,1)>>> ()",
        *code,
        f"pc             {base + pc:#x}      {base + pc:#x} <{_NAME}+{pc}>",
        "errorpc        <unavailable>",
        *registers,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "cuda-gdb.log"
    path.write_text(transcript())
    return path


def test_a_transcript_gives_the_equation_and_status_3(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", str(log)]) == 3
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert text.startswith("HANG: gpu-spin-barrier")
    assert "arrival_counter = 1, waits until it is >= 2" in flat
    assert "+0x0520 LDG.E.STRONG.GPU R4" in flat
    assert "group 6: spinning 12" in flat
    assert "not observed in this evidence: drain, mtp" in flat
    assert [line for line in text.splitlines() if len(line) > 80 and "/" not in line and not line.startswith("next: ")] == []


def test_json_and_expectation(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", str(log), "--json", "--expect", "hang"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outcome"] == "hang"
    assert document["ground"] == "file"
    assert document["waits"][0]["value"] == 1
    assert document["waits"][0]["target"] == 2
    assert main(["autopsy", str(log), "--expect", "clean"]) == 1


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, ".gz"), (lzma.compress, ".xz")])
def test_compressed_evidence_is_read_and_named_as_it_was_given(
    log: Path, pack: Callable[[bytes], bytes], suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = log.with_name(log.name + suffix)
    packed.write_bytes(pack(log.read_bytes()))
    assert main(["autopsy", str(packed), "--json"]) == 3
    (evidence,) = json.loads(capsys.readouterr().out)["evidence"]
    assert evidence["path"].endswith(packed.name)
    import hashlib

    assert evidence["sha256"] == hashlib.sha256(packed.read_bytes()).hexdigest()


def test_a_core_dump_is_known_by_its_content_whatever_its_name(
    fakes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "whatever.txt"
    write_core(path, fakes.state())
    status = main(["autopsy", str(path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status in (3, 5)
    assert document["evidence"][0]["sha256"]
    assert document["unread"], "without code there is something that could not be read"
    assert document["waits"] == [], "no equation without machine code"


def test_out_keeps_diagnosis_and_report(log: Path, tmp_path: Path) -> None:
    assert main(["autopsy", str(log), "--out", str(tmp_path / "kept")]) == 3
    view = open_run(tmp_path / "kept")
    assert view.run.scenario == "autopsy"
    assert view.diagnosis is not None
    assert "Autopsy of " in (tmp_path / "kept" / "report.md").read_text()
    assert main(["report", str(tmp_path / "kept")]) == 0


def test_a_diagnosis_that_cannot_be_kept_is_said_and_in_the_record(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_arguments: Any) -> None:
        raise RunStoreError("cannot write: the disk or the quota is full", path="diagnosis.json")

    monkeypatch.setattr(RunStore, "write_diagnosis", full)
    assert main(["autopsy", str(log), "--out", str(tmp_path / "kept")]) == 5
    assert "diagnosis.json: cannot write" in capsys.readouterr().err
    record = json.loads((tmp_path / "kept" / "run.json").read_text())
    assert (record["state"], record["outcome"], record["exit_status"]) == ("finished", "hang", 5)
    assert "diagnosis.json" in record["error"]


def _run_with(tmp_path: Path, files: dict[str, tuple[str, bytes]], diagnosis: Diagnosis | None = None) -> Path:
    with RunStore.create("drain", out=tmp_path / "run") as store:
        store.write_run(RunRecord(scenario="drain", ground="gpu", state="finished"))
        for name, (kind, content) in files.items():
            (store.evidence_folder / name).write_bytes(content)
            store.add_evidence(kind, store.evidence_folder / name)
        if diagnosis is not None:
            store.write_diagnosis(diagnosis.document())
    return tmp_path / "run"


def _own(fakes: Any, **more: Any) -> Diagnosis:
    base = fakes.diagnose(fakes.state(), step=None, evidence=(), unwedge=None)
    return Diagnosis.model_validate({**base.document(), **more})


def test_a_run_directory_is_judged_from_its_transcript_with_what_the_run_knew(
    fakes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = [{"link": "drain", "status": "computed", "text": "3 requests were left"}]
    own = _own(
        fakes, chain=chain, window={"live_requests": 3, "rows": 6, "graph_rows": 8, "padded_requests": 1, "reached": True},
        unwedge={"attempted": True, "retired": True, "milliseconds": 0.7, "address": "0x1"},
    )  # fmt: skip
    run = _run_with(tmp_path, {"cuda_gdb.txt": ("cuda-gdb", transcript().encode())}, own)
    shutil.move(run, tmp_path / "elsewhere")
    assert main(["autopsy", str(tmp_path / "elsewhere"), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    links = {link["link"]: link for link in document["chain"]}
    assert links["drain"]["text"] == "3 requests were left"
    assert links["barrier"]["status"] == "measured"
    assert document["window"]["live_requests"] == 3
    assert document["unwedge"]["retired"] is True
    assert document["ground"] == "gpu"
    assert document["agrees_with_run"] is True


def test_a_killed_run_without_a_diagnosis_is_judged_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run_with(tmp_path, {"cuda_gdb.txt": ("cuda-gdb", transcript().encode())})
    assert main(["autopsy", str(run), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert "diagnosis.json" in [item["what"] for item in document["unread"]]


def test_a_damaged_dump_is_said_and_the_transcript_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run_with(
        tmp_path, {"a.nvcudmp": ("gpu-core", b"\x7fELF" + b"\0" * 100), "cuda_gdb.txt": ("cuda-gdb", transcript().encode())}
    )
    assert main(["autopsy", str(run), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert any(item["what"] == "E1 (gpu-core)" for item in document["unread"])


def test_a_run_without_device_evidence_repeats_its_own_diagnosis_and_says_so(
    fakes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run_with(tmp_path, {}, _own(fakes))
    assert main(["autopsy", str(run), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert any("its own diagnosis is repeated" in item["why"] for item in document["unread"])


def test_a_run_with_nothing_is_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", str(_run_with(tmp_path, {}))]) == 5
    assert "nothing to judge" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\x7fELF", os.urandom(4096), b"\x1f\x8b" + b"x" * 100, b"\xfd7zXZ\x00" + b"x" * 100]
)
def test_garbage_is_5_without_a_traceback(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    assert main(["autopsy", str(path)]) == 5
    captured = capsys.readouterr()
    assert "garbage" in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_what_is_not_there_or_not_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", str(tmp_path / "nothing")]) == 2
    os.mkfifo(tmp_path / "pipe")
    assert main(["autopsy", str(tmp_path / "pipe")]) in (2, 5)
    assert "Traceback" not in capsys.readouterr().err


def test_a_process_is_not_touched_without_attach(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["autopsy", str(os.getpid())]) == 2
    err = capsys.readouterr().err
    assert "was not touched" in err
    assert "Attaching freezes the process" in err
    assert f"dsv4-repro autopsy {os.getpid()} --attach" in err
    assert list(tmp_path.iterdir()) == []
    assert main(["autopsy", "1234567", "x", "--attach"]) == 2
    assert main(["autopsy", "x", "--attach"]) == 2


def test_without_a_debugger_attaching_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if list(Path("/usr/local").glob("cuda*/bin/cuda-gdb")):
        pytest.skip("there is a cuda-gdb")
    assert main(["autopsy", str(os.getpid()), "--attach"]) == 5
    assert "cuda-gdb" in capsys.readouterr().err


def test_unpacking_is_bounded_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as stream:
        for _ in range(64):
            stream.write(b"\0" * (1 << 20))
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(EvidenceError, match="unpacks to more than"), plain_file(bomb, limit=1 << 20):
        pass
    assert len(peek(bomb, 100)) == 100
    with plain_file(bomb, limit=1 << 30) as plain:
        assert plain.stat().st_size == 64 << 20
    assert list(tmp_path.iterdir()) == [bomb]


def test_a_cut_off_archive_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "cut.xz"
    path.write_bytes(lzma.compress(os.urandom(1 << 20), preset=0)[:700_000])
    with pytest.raises(EvidenceError, match=r"after \d+ unpacked bytes"), plain_file(path):
        pass


def test_heads(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert head_of(tmp_path / "x", 2) == b"ab"
    with plain_file(tmp_path / "x") as plain:
        assert plain == tmp_path / "x"
    with pytest.raises(EvidenceError):
        head_of(tmp_path)
    assert unpack.MAX_UNPACKED == 2 << 30


def test_a_pid_that_is_not_there_is_not_offered_an_attach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", "999999999"]) == 2
    said = capsys.readouterr().err
    assert "no such file, run directory or process" in said
    assert "--attach" not in said
