"""Files, folders and archives: all of it is read or listed, nothing of it escapes or runs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import UsageError
from dsv4_repro.forensics.autopsy import autopsy_case, autopsy_paths
from dsv4_repro.forensics.evidence import engine_log, read_failures, sieve
from dsv4_repro.forensics.evidence.archive import Budget
from dsv4_repro.forensics.evidence.casefile import CaseFile
from dsv4_repro.forensics.evidence.detect import sniff
from dsv4_repro.forensics.evidence.gather import READERS, read_paths, read_text

CASES = Path(__file__).parent.parent.parent / "cases"
LINE = b"[12.0] NVRM: Xid (PCI:0000:c1:00): 31, pid=2200, name=VLLM::Worker, MMU Fault: ACCESS_TYPE_VIRT_WRITE\n"


def xids(case: CaseFile) -> int:
    return sum(1 for event in case.kernel if event.kind == "xid")


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress, zstd, lambda d: gzip.compress(lzma.compress(d))])
def test_compressed_by_content_whatever_the_name(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "kern.log").write_bytes(pack(LINE))
    case = read_paths([tmp_path / "kern.log"])
    assert xids(case) == 1
    assert case.parts[0].sha256 is not None


def test_two_members_of_gzip_and_zstd_frames_are_both_read(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(LINE) + gzip.compress(LINE))
    assert xids(read_paths([tmp_path / "a.gz"])) == 2
    (tmp_path / "a.zst").write_bytes(zstd(LINE) + zstd(LINE))
    assert xids(read_paths([tmp_path / "a.zst"])) == 2


def test_zstd_program_where_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    import sys

    if shutil.which("zstd") is None:
        pytest.skip("no zstd program here")
    (tmp_path / "a.zst").write_bytes(zstd(LINE))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert xids(read_paths([tmp_path / "a.zst"])) == 1
    monkeypatch.setattr(shutil, "which", lambda name: None)
    case = read_paths([tmp_path / "a.zst"])
    assert "zstandard" in case.parts[0].note


def make_tar(path: Path, mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name in ("ok/dmesg", "../../escape", "/abs/olute"):
            info = tarfile.TarInfo(name)
            info.size = len(LINE)
            archive.addfile(info, io.BytesIO(LINE))
        link = tarfile.TarInfo("ok/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        device = tarfile.TarInfo("ok/dev")
        device.type = tarfile.CHRTYPE
        archive.addfile(device)


def test_tar_with_links_and_names_that_leave(tmp_path: Path) -> None:
    make_tar(tmp_path / "t.tgz")
    before = sorted(p for p in tmp_path.parent.iterdir())
    case = read_paths([tmp_path / "t.tgz"])
    assert xids(case) == 3
    notes = {part.path: part.note for part in case.parts if part.note}
    assert "not followed" in notes["t.tgz!ok/link"]
    assert "not followed" in notes["t.tgz!ok/dev"]
    assert "leaves the archive" in notes["t.tgz!../../escape"]
    assert sorted(p for p in tmp_path.parent.iterdir()) == before


def test_zip_with_links_names_nesting_and_encryption(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("dmesg", LINE)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/dmesg", LINE)
        archive.writestr("..\\..\\win", LINE)
        archive.writestr("inner.zip", inner.getvalue())
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    case = read_paths([tmp_path / "b.zip"])
    assert xids(case) == 3
    assert any("not followed" in part.note for part in case.parts)
    assert "root:" not in str(case.parts)


def test_a_member_without_a_name_costs_nobody_else(tmp_path: Path) -> None:
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w") as archive:
        archive.writestr("a", LINE)
        archive.writestr("b/dmesg", LINE)
    raw = bytearray(kept.getvalue())
    entry = raw.index(b"PK\x01\x02")
    raw[entry + 28], raw[entry + 32] = 0, 1  # the name's one byte becomes a comment
    (tmp_path / "c.zip").write_bytes(raw)
    case = read_paths([tmp_path / "c.zip"])
    assert xids(case) == 1
    assert any("damaged" in item.note for item in case.parts)  # zipfile opens none whose header has another name


def test_bombs_stop_and_what_was_read_stays(tmp_path: Path) -> None:
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(LINE + b"\n" * (80 << 20)))
    case = read_paths([tmp_path / "bomb.gz"], Budget(ratio_from=8 << 20, ratio=100))
    assert any("bomb" in item.why for item in case.unread)
    case = read_paths([tmp_path / "bomb.gz"], Budget(expanded_bytes=4 << 20))
    assert any("stopped after 4 MiB" in item.why for item in case.unread)


def test_nesting_and_member_counts_are_bounded(tmp_path: Path) -> None:
    data = LINE
    for _ in range(9):
        data = gzip.compress(data)
    (tmp_path / "deep.gz").write_bytes(data)
    case = read_paths([tmp_path / "deep.gz"])
    assert "more than 4 times" in case.parts[0].note
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for index in range(60):
            archive.writestr(f"f{index}", LINE)
    case = read_paths([tmp_path / "many.zip"], Budget(members=20))
    assert any("members" in item.why for item in case.unread)
    assert 0 < xids(case) < 60


@pytest.mark.parametrize("cut", [3, 20, 60])
def test_torn_archives_say_so_and_keep_what_came_before(tmp_path: Path, cut: int) -> None:
    whole = gzip.compress(LINE * 2000, mtime=0)
    (tmp_path / "torn.gz").write_bytes(whole[:-cut])
    case = read_paths([tmp_path / "torn.gz"])
    assert any("torn" in part.note or "damaged" in part.note for part in case.parts)
    assert xids(case) > 1000
    make_tar(tmp_path / "t.tar", "w")
    data = (tmp_path / "t.tar").read_bytes()
    (tmp_path / "t2.tar").write_bytes(data[: len(data) // 3])
    read_paths([tmp_path / "t2.tar"])
    (tmp_path / "z.zip").write_bytes(b"PK\x03\x04" + os.urandom(200))
    case = read_paths([tmp_path / "z.zip"])
    assert case.unread


def test_links_pipes_and_repeats_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(LINE)
    (folder / "a").write_bytes(LINE)
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "self").symlink_to(folder)
    os.link(folder / "a", folder / "b")
    os.mkfifo(folder / "pipe")
    case = read_paths([folder])
    assert xids(case) == 1
    notes = {part.path: part.note for part in case.parts}
    assert "not followed" in notes["link"]
    assert "not followed" in notes["self"]
    assert "same file" in notes["b"]
    assert "not opened" in notes["pipe"]
    # A link that was given itself is what the user asked for.
    assert xids(read_paths([folder / "link"])) == 1


def test_a_missing_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        read_paths([tmp_path / "nope"])


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(LINE * 10)
    from dsv4_repro.forensics.evidence import gather

    original = gather._read_leaf

    def grow(leaf, given, case, orders):  # type: ignore[no-untyped-def]
        original(leaf, given, case, orders)
        with path.open("ab") as handle:
            handle.write(LINE)

    monkeypatch.setattr(gather, "_read_leaf", grow)
    case = read_paths([path])
    assert any("changed while it was read" in part.note for part in case.parts)


def test_unreadable_files_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(LINE)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads everything")
    case = read_paths([path])
    assert case.unread


def test_kinds_are_told_by_content() -> None:
    assert sniff(b"") == "empty"
    assert sniff(b"\x7fELF\x02\x01\x01" + b"\x00" * 9 + (4).to_bytes(2, "little") + (190).to_bytes(2, "little")) == "gpu-core"
    assert sniff(b"\x7fELF\x02\x01\x01" + b"\x00" * 9 + (2).to_bytes(2, "little") + (62).to_bytes(2, "little")) == "elf"
    assert sniff(b"INFO hello\n" + b"\x00" * 9000 + b"INFO more\n") == "text"
    assert sniff(os.urandom(9000).replace(b"\x1f\x8b", b"xx")) in ("binary", "text")
    assert sniff(b"\x89PNG\r\n\x1a\n") == "binary"
    assert sniff("größer\n".encode()) == "text"
    assert sniff("x".encode("utf-16")) == "utf16"


def test_utf16_logs_are_read(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(LINE.decode().encode("utf-16"))
    assert xids(read_paths([tmp_path / "log.txt"])) == 1


def test_what_nobody_understands_is_listed_with_its_place() -> None:
    case = read_text("x", "=== notes ===\nhello there\nhow are you\n=== dmesg ===\n[1.0] x\n")
    part = next(part for part in case.parts if part.heading == "notes")
    assert (part.kinds, part.unrecognised, part.first_unrecognised) == ((), 2, 2)


def test_a_reader_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_repro.forensics.evidence import gather

    def broken(section: object, case: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(gather, "READERS", (("host stacks", broken), *READERS[1:]))
    case = read_text("x", LINE)
    assert xids(case) == 1
    assert any("boom" in item.why for item in case.unread)


HOSTILE = [
    b"\x00" * 5000,
    b"\xff\xfe\xfd" * 3000,
    b"\x1b[2J\x1b]0;pwn\x07" + LINE,
    b"<script>alert(1)</script> | ``` </details> [x](javascript:1)\n" + LINE,
    b"=" * 100_000,
    b"(" * 100_000,
    b"Thread 1 (idle): \"" + b"A" * 200_000 + b"\"\n    f (x.py:1)\n",
    b"{" * 60_000,
    b'{"entries": [' * 3000,
    b"=== " + b"a" * 200_000 + b" ===\nx\n",
    b"num_scheduled_tokens={" * 4000,
    b"Dumping scheduler output for model execution: " + b"'a': 2, " * 30_000,
    b"  BlockIdx To BlockIdx Count   State\nKernel 0\n*  (0,0,0)    (4294967295,0,0)     99999999999 running\n*      0 - 0 1 "
    b"Active 0x1 (99999999,1,1) (1,1,1) k\n",
    ("İ" * 20_000).encode() + b"\n",
    b"Loading x shards: 1% |" * 3000,
    b"a" * (2 << 20),
    b"\r".join([b"Loading safetensors checkpoint shards:   6% Completed | 10/163 [04:11<1:03:55, 25.07s/it]"] * 200),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_give_an_answer_in_bounded_time(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    start = time.process_time()
    result = autopsy_paths([path])
    assert time.process_time() - start < 6.0
    text = str(result.diagnosis.document())
    assert "\x1b" not in text
    assert "\x00" not in text


def trigger_words() -> list[str]:
    gates = {word for words in engine_log._GATES.values() for word in words}
    more = {
        "last enqueued",
        "(idle)",
        "#0 ",
        "Dumping scheduler stats: SchedulerStats(",
        "arrival_counter",
        "<<<(1,1,1),",
        "(LWP 1",
        "vllm:",
        " PID COMMAND",
    }
    return sorted(gates | set(sieve._LINE_NEEDLES) | set(sieve._BLOCK_NEEDLES) | set(read_failures._GATE) | more)


@pytest.mark.parametrize("shape", ["tail", "repeated", "digits", "lines"])
def test_no_word_makes_a_long_line_slow(shape: str) -> None:
    slow = []
    for word in trigger_words():
        text = {
            "tail": word + "a" * 8_000,
            "repeated": word * (8_000 // len(word)),
            "digits": word + "1" * 8_000,
            "lines": f"{word}\n\n\n\n" * 60,
        }[shape]
        start = time.process_time()
        read_text("x", text)
        if time.process_time() - start > 0.4:
            slow.append(word)
    assert not slow


def test_many_blank_lines_and_words_stay_linear() -> None:
    text = "\n".join(trigger_words()) + "\nPyTorch version" + "\n" * 40_000 + "flashinfer" + "\n" * 20_000
    start = time.process_time()
    read_text("x", text)
    assert time.process_time() - start < 4.0


def test_numbers_that_are_none_do_not_stop_a_reader() -> None:
    text = (
        "Engine 000: Avg prompt throughput: 1.2.3 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 3 reqs, "
        "Waiting: 0 reqs\n"
        f"rchar: {'9' * 20_000}\nvllm:num_requests_running {'8' * 9000}\n" + LINE.decode()
    )
    case = read_text("x", text)
    assert xids(case) == 1
    assert not case.unread


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 47))
def test_mutilated_cases_never_raise(rng: random.Random, number: int) -> None:
    files = sorted(CASES.glob("*.txt"))
    data = bytearray(files[number % len(files)].read_bytes())
    for _ in range(rng.randint(1, 12)):
        at = rng.randrange(len(data))
        choice = rng.random()
        if choice < 0.4:
            data[at] = rng.randrange(256)
        elif choice < 0.7:
            del data[at : at + rng.randint(1, 200)]
        else:
            data[at:at] = bytes(rng.choices(range(256), k=rng.randint(1, 40)))
    result = autopsy_case(read_text("x", bytes(data)))
    assert not [f for f in result.classification.findings if f.error]
    assert not [item for item in result.diagnosis.unread if "reader failed" in item.why]
    result.diagnosis.document()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=4000))
def test_any_bytes_give_an_answer(data: bytes) -> None:
    result = autopsy_case(read_text("x", data))
    assert result.diagnosis.verdict.class_ == "unknown" or result.diagnosis.verdict.confidence in ("low", "medium", "high")


def test_file_names_cannot_write_to_the_screen(tmp_path: Path) -> None:
    name = b"a\x1b[2J\x07\xff\n<b>.log"
    path = os.fsencode(tmp_path) + b"/" + name
    with open(path, "wb") as handle:
        handle.write(LINE)
    document = autopsy_paths([tmp_path]).diagnosis.document()
    text = str(document)
    assert "\x1b" not in text
    assert "\x07" not in text
    text.encode("utf-8")
