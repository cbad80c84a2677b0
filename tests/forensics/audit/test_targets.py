"""Targets: what may be audited, how a build is named, and every bad input a typed error with its place."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from dsv4_repro.errors import CubinError, KernelNotFoundError, ReproError, UsageError
from dsv4_repro.forensics.audit import known_builds, targets
from dsv4_repro.forensics.audit.known_builds import python_fingerprint, releases_with_cubins, releases_with_python
from dsv4_repro.forensics.audit.known_builds_data import CUBINS, PYTHON
from dsv4_repro.forensics.audit.targets import ProcessView, expand_targets, open_target
from dsv4_repro.kernels.build import builtin_image


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [Version(text) for text in ("0.24.0", "0.25.0", "0.25.1", "0.26.0rc1", "0.26.0", "0.34.0")]
    monkeypatch.setattr(targets, "_published", lambda: versions)


@pytest.mark.usefixtures("published")
def test_ranges_become_published_releases_without_previews() -> None:
    assert expand_targets(["vllm>=0.25,<0.34"]) == ["vllm==0.25.0", "vllm==0.25.1", "vllm==0.26.0"]
    assert expand_targets(["vllm==0.25.*", "x.whl", "vllm == 0.26.0"]) == ["vllm==0.25.0", "vllm==0.25.1", "x.whl", "vllm==0.26.0"]
    assert expand_targets(["installed", "installed"]) == ["installed"]
    with pytest.raises(KernelNotFoundError):
        expand_targets(["vllm>9"])
    with pytest.raises(UsageError):
        expand_targets(["vllm>=nonsense!!"])


def test_a_build_of_our_own_is_a_target() -> None:
    opened = open_target("builtin:guard", arch=120)
    assert opened.kernels is not None
    assert [image.sm for image in opened.kernels.images] == [120]
    assert opened.identity.known
    assert opened.unread  # it has no release around it, and that is said


def test_a_cubin_is_judged_by_its_bytes_and_not_named(tmp_path: Path) -> None:
    path = tmp_path / "vllm-0.28.0.cubin"  # the name claims nothing
    path.write_bytes(builtin_image("unguarded", 120, 512, 4).cubin)
    opened = open_target(str(path))
    assert opened.kernels is not None
    assert (opened.identity.name, opened.identity.known) == ("unknown build", False)
    assert "of no release known here" in opened.identity.how
    assert [item.what for item in opened.unread] == ["the build's Python"]
    _, note = opened.profile()
    assert "assumed" in note


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


def test_a_fork_is_never_named_by_the_version_it_claims(tmp_path: Path) -> None:
    image = builtin_image("unguarded", 120, 512, 4)
    members = {
        "vllm/_C.abi3.so": image.cubin, "vllm/_version.py": b"__version__ = '0.33.0'\n",
        "vllm-0.33.0.dist-info/METADATA": b"Name: vllm\nVersion: 0.33.0\n",
    }  # fmt: skip
    try:
        opened = open_target(str(wheel(tmp_path / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl", members)))
    except ReproError:
        pytest.skip("a bare cubin is not taken for a library")
    assert opened.identity.name == "unknown build"
    assert opened.identity.claims == "0.33.0"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("no.whl", b""), ("text.whl", b"this is no wheel"), ("cut.whl", b"PK\x03\x04" + b"\0" * 40), ("x.so",
        b"\x7fELF" + b"\0" * 60),
        ("x.cubin", b"\x7fELF\x02\x01\x01" + b"\xff" * 200), ("elf.so", b"\x7fELF\x02\x01\x01" + b"\0" * 57), ("dir.whl", None),
        ("absent.whl", ...),
    ],
)  # fmt: skip
def test_what_cannot_be_opened_is_a_typed_error(name: str, content: object, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ReproError) as caught:
        open_target(str(path))
    assert str(caught.value)


def test_hostile_wheels(tmp_path: Path) -> None:
    """Path traversal names write nothing; a member that inflates without end is refused."""
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm/v1/attention/backends/mla/indexer.py", b"\0" * (64 << 20))
        archive.writestr("../../escape.py", b"x")
        archive.writestr("/etc/passwd", b"x")
        archive.writestr("vllm/_C.abi3.so", b"\x7fELF" + b"\0" * (64 << 20))
    path = tmp_path / "vllm-1-py3-none-any.whl"
    path.write_bytes(bomb.getvalue())
    with pytest.raises(ReproError):
        open_target(str(path))
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name]


@pytest.mark.parametrize(
    "text", ["https://example.invalid/notawheel.txt", "https://example.invalid/torch-2.0-cp312-cp312-linux_x86_64.whl"]
)
def test_addresses_that_are_no_wheel_of_vllm(text: str) -> None:
    with pytest.raises(UsageError):
        open_target(text)


def test_a_process_without_the_library() -> None:
    with pytest.raises(KernelNotFoundError, match="has loaded no vLLM library"):
        open_target("77", process=ProcessView(77, ("/usr/lib/libc.so.6", "/x/vllm/cumem_allocator.abi3.so")))


def test_a_process_s_library_is_the_one_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "site" / "vllm"
    folder.mkdir(parents=True)
    library = folder / "_C_stable_libtorch.abi3.so"
    library.write_bytes(builtin_image("guard", 120, 512, 4).cubin)
    (folder / "v1" / "attention").mkdir(parents=True)
    (folder / "v1" / "attention" / "x.py").write_text("x = 1")
    dist = tmp_path / "site" / "vllm-0.99.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Name: vllm\nVersion: 0.99\n")
    opened = open_target("77", process=ProcessView(77, (str(library),)))
    assert opened.kernels is not None
    assert opened.identity.claims == "0.99"
    assert not opened.identity.known
    assert "vllm/v1/attention/x.py" in opened.members


def test_a_broken_library_of_a_process(tmp_path: Path) -> None:
    library = tmp_path / "vllm" / "_C.abi3.so"
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 57)
    with pytest.raises(CubinError, match=r"_C\.abi3\.so"):
        open_target("77", process=ProcessView(77, (str(library),)))


def test_known_builds_are_named_by_all_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "a" * 64, "b" * 64
    monkeypatch.setattr(known_builds, "CUBINS", {("1.0", "1.1"): (first[:24],), ("1.1",): (second[:24],)})
    assert releases_with_cubins([first]) == ("1.0", "1.1")
    assert releases_with_cubins([first, second]) == ("1.1",)
    assert releases_with_cubins([first, "c" * 64]) == ()
    assert releases_with_cubins([]) == ()
    members = {"vllm/_version.py": b"v", "unrelated.py": b"z"}
    monkeypatch.setattr(known_builds, "PYTHON", {"1.1": (python_fingerprint(members),)})
    assert releases_with_python(members) == ("1.1",)
    assert releases_with_python({**members, "vllm/_version.py": b"w"}) == ()
    assert releases_with_python({}) == ()


def test_the_shipped_table_is_whole() -> None:
    versions = {version for group in CUBINS for version in group}
    assert {"0.20.0", "0.27.1", "0.28.0", "0.33.0"} <= versions
    assert versions <= set(PYTHON)
    digests = [digest for group in CUBINS.values() for digest in group]
    assert len(digests) == len(set(digests))
    assert all(len(digest) == 24 for digest in digests)
    codes = [code for group in PYTHON.values() for code in group]
    assert len(codes) == len(set(codes)), "two releases with the same deciding Python cannot be told apart"
