"""Origins of shipped kernels, against wheels, objects and an index made here; with real releases where the network allows it."""

from __future__ import annotations

import hashlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import CubinError, DownloadError, KernelNotFoundError, ReproError, UsageError
from dsv4_repro.kernels import releases
from dsv4_repro.kernels.image import sha256_hex
from dsv4_repro.kernels.release_cache import ReleaseCache
from dsv4_repro.kernels.shipped import binary_compatible, cached_kernels, release_members, shipped_kernels

LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
WHEEL = "vllm-0.99.0-cp38-abi3-manylinux_2_28_x86_64.whl"
SOURCES = {"vllm/v1/attention/backends/mla/indexer.py": b"native = 1\n", "vllm/other.py": b"x = 2\n"}


@pytest.fixture(autouse=True)
def _x86(monkeypatch: pytest.MonkeyPatch, cache_root: Path) -> None:
    monkeypatch.setattr(releases.platform, "machine", lambda: "x86_64")  # type: ignore[attr-defined]


@pytest.fixture
def wheel(makers: Any, library: bytes) -> bytes:
    plain = makers.object({".text": b"\xc3" * 64})
    result: bytes = makers.wheel({LIBRARY: library, "vllm/spinloop.abi3.so": plain, **SOURCES})
    return result


# ---------------------------------------------------------------------------------------------------------------------------------
# Files


def test_a_shared_object_gives_every_architecture_and_instantiation(library: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(library)
    found = shipped_kernels(str(file))
    assert found.labels == ("sm_80", "sm_90", "sm_120")
    assert {(image.sm, image.top_k, image.vec) for image in found.images} == {
        (sm, top_k, vec) for sm in (80, 90, 120) for top_k, vec in ((512, 4), (1024, 2))
    }
    assert {image.origin for image in found.images} == {str(file)}
    assert all(image.cubin_sha256 == sha256_hex(image.cubin) for image in found.images)
    assert not found.from_cache
    assert shipped_kernels(str(file)).from_cache


def test_a_cubin_and_a_fat_binary(standin_cubin: Any, makers: Any, tmp_path: Path) -> None:
    (tmp_path / "k.cubin").write_bytes(standin_cubin("sm_120"))
    assert shipped_kernels(str(tmp_path / "k.cubin")).pick(120, 512, 4).cubin == standin_cubin("sm_120")
    (tmp_path / "k.fatbin").write_bytes(makers.fatbin([[makers.entry(90, standin_cubin("sm_90"))]]))
    assert shipped_kernels(str(tmp_path / "k.fatbin")).labels == ("sm_90",)


def test_a_wheel_gives_its_release_and_library(wheel: bytes, tmp_path: Path) -> None:
    file = tmp_path / WHEEL
    file.write_bytes(wheel)
    found = shipped_kernels(str(file))
    assert (found.release, found.library, found.source) == ("0.99.0", LIBRARY, WHEEL)
    assert "RECORD" in found.verified
    assert found.pick(90, 512, 4).sm == 90


def test_a_kernel_in_an_unlikely_library_of_a_local_wheel_is_found(makers: Any, library: bytes, tmp_path: Path) -> None:
    file = tmp_path / WHEEL
    file.write_bytes(makers.wheel({"vllm/deep/_other.abi3.so": library, LIBRARY: makers.object({".text": b"\xc3"})}))
    assert shipped_kernels(str(file)).library == "vllm/deep/_other.abi3.so"


def test_an_architecture_filter_loads_only_what_runs_there(library: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(library)
    found = shipped_kernels(str(file), arch=121)
    assert {image.sm for image in found.images} == {120}
    assert found.labels == ("sm_80", "sm_90", "sm_120")
    with pytest.raises(KernelNotFoundError, match="no machine code for sm_110; it has sm_80, sm_90, sm_120"):
        shipped_kernels(str(file), arch=110).pick(110, 512, 4)


def test_instantiations_that_are_not_there_list_those_that_are(library: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(library)
    with pytest.raises(KernelNotFoundError, match=r"no instantiation <2048,1> for sm_90; it has <1024,2>, <512,4>"):
        shipped_kernels(str(file)).pick(90, 2048, 1)


@pytest.mark.parametrize(
    ("cubin", "specific", "sm", "fits"),
    [
        (120, False, 120, True),
        (120, False, 121, True),
        (121, False, 120, False),
        (100, False, 103, True),
        (100, False, 120, False),
        (80, False, 86, True),
        (80, False, 89, True),
        (89, False, 86, False),
        (80, False, 90, False),
        (90, True, 90, True),
        (120, True, 121, False),
        (100, True, 103, False),
    ],
)
def test_binary_compatibility_is_cudas_rule(cubin: int, specific: bool, sm: int, fits: bool) -> None:
    assert binary_compatible(cubin, specific, sm) is fits


def test_the_nearest_older_code_is_taken_and_specific_code_never_elsewhere(makers: Any, standin_cubin: Any, tmp_path: Path) -> None:
    file = tmp_path / "k.fatbin"
    file.write_bytes(
        makers.fatbin(
            [
                [
                    makers.entry(sm, standin_cubin(arch), suffix)
                    for sm, arch, suffix in ((80, "sm_80", ""), (89, "sm_89", ""), (120, "sm_120a", "a"))
                ]
            ]
        )
    )
    found = shipped_kernels(str(file))
    assert found.labels == ("sm_80", "sm_89", "sm_120a")
    assert [found.pick(sm, 512, 4).sm for sm in (80, 86, 89, 120)] == [80, 80, 89, 120]
    with pytest.raises(KernelNotFoundError, match="sm_121"):
        found.pick(121, 512, 4)


def test_no_kernel_says_what_was_looked_at(makers: Any, other_cubin: Any, tmp_path: Path) -> None:
    cases = {
        "plain.so": (makers.object({".text": b"\xc3"}), "carries no GPU code"),
        "other.so": (makers.object({".nv_fatbin": makers.fatbin([[makers.entry(90, other_cubin("sm_90"))]])}), "other.so"),
        "other.cubin": (other_cubin("sm_90"), "other.cubin"),
        WHEEL: (makers.wheel({LIBRARY: makers.object({".text": b"\xc3"})}), LIBRARY),
        "rocm-0.1-py3-none-any.whl": (makers.wheel({"vllm/a.py": b""}), "nothing that could hold GPU code"),
        WHEEL.replace("0.99.0", "0.19.1"): (
            makers.wheel({LIBRARY: b"\x7fELF"}, version="0.19.1"),
            "first release with one is 0.20.0",
        ),
    }
    for name, (content, what) in cases.items():
        file = tmp_path / name
        file.write_bytes(content)
        for _ in range(2):
            with pytest.raises(KernelNotFoundError, match="persistent_topk_kernel") as caught:
                shipped_kernels(str(file))
            assert what in str(caught.value), name


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("empty.so", b"", CubinError),
        ("text.so", b"hello world" * 20, CubinError),
        ("half.so", b"\x7fELF\x02\x01\x01" + b"\0" * 20, CubinError),
        ("zip.whl", b"PK\x03\x04" + b"\0" * 100, CubinError),
        ("fat.fatbin", b"\x50\xed\x55\xba" + b"\xff" * 40, CubinError),
        ("32bit.so", b"\x7fELF\x01\x01\x01" + b"\0" * 100, CubinError),
    ],
)
def test_files_that_are_something_else_are_typed_errors(name: str, content: bytes, kind: type[ReproError], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(kind, match=name):
        shipped_kernels(str(file))


def test_a_zip_that_is_no_wheel_is_said(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(CubinError, match="no wheel"):
        shipped_kernels(str(tmp_path / "a.zip"))


@pytest.mark.parametrize(
    "spec", ["", "foo", "nosuch.so", "x" * 5000, "a\0b", "vllm==", "vllm==abc", "vllm>=0.27", "torch==2.0", "vllm==1==2"]
)
def test_nonsense_is_a_usage_error(spec: str, no_network: None) -> None:
    with pytest.raises(UsageError):
        shipped_kernels(spec)


def test_folders_and_devices_are_usage_errors(tmp_path: Path) -> None:
    for spec in (str(tmp_path), "/dev/zero"):
        with pytest.raises(UsageError):
            shipped_kernels(spec)


def test_a_hostile_wheel_writes_nothing_outside_the_cache(makers: Any, library: bytes, tmp_path: Path, cache_root: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    file = folder / WHEEL
    file.write_bytes(
        makers.wheel(
            {"../../../evil.so": library, "/abs/evil.so": library, "vllm/_C_x.so/../../up.so": library, "vllm/_C.so": library}
        )
    )
    shipped_kernels(str(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "in"]
    assert list(folder.iterdir()) == [file]
    assert list((cache_root / "work").iterdir()) == []


def test_only_the_cubins_with_the_kernel_are_kept(wheel: bytes, tmp_path: Path, cache_root: Path) -> None:
    file = tmp_path / WHEEL
    file.write_bytes(wheel)
    found = shipped_kernels(str(file))
    kept = {path.name for path in (cache_root / "shipped").rglob("*") if path.is_file()}
    cubins = {image.cubin_sha256 for image in found.images}
    assert cubins < kept
    # Besides them: the list of the wheel's members.
    assert len(kept) == len(cubins) + 1


# ---------------------------------------------------------------------------------------------------------------------------------
# Releases on an index


def test_a_release_is_read_in_ranges_and_then_needs_no_network(
    index_server: Any, makers: Any, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random

    ballast = {f"vllm/big{number}.bin": random.Random(number).randbytes(4 << 20) for number in range(2)}
    index_server.files[WHEEL] = makers.wheel({**ballast, LIBRARY: library, **SOURCES})
    seen: list[tuple[str, int, int | None]] = []
    found = shipped_kernels("vllm==0.99", progress=lambda *what: seen.append(what))
    assert (found.origin, found.release, found.machine, found.library) == ("vllm==0.99.0", "0.99.0", "x86_64", LIBRARY)
    assert "in ranges" in found.verified
    assert found.pick(121, 512, 4).sm == 120
    fetched = [header for path, header in index_server.requests if path.startswith("/files/")]
    assert fetched
    assert all(header is not None for header in fetched)
    before = len(index_server.requests)
    again = shipped_kernels("vllm==0.99.0")
    assert again.from_cache
    assert again.images == found.images
    assert len(index_server.requests) == before
    assert cached_kernels() == ("vllm==0.99.0",)


def test_a_large_member_shows_progress(index_server: Any, makers: Any, library: bytes) -> None:
    import random

    big = library + b"\0" * (-len(library) % 8) + random.Random(1).randbytes(3 << 20)
    index_server.files[WHEEL] = makers.wheel({LIBRARY: big})
    seen: list[tuple[str, int, int | None]] = []
    shipped_kernels("vllm==0.99.0", progress=lambda *what: seen.append(what))
    assert seen[-1][1] == seen[-1][2]
    assert LIBRARY in seen[-1][0]


def test_without_ranges_the_whole_wheel_is_checked_against_the_index(index_server: Any, wheel: bytes, cache_root: Path) -> None:
    index_server.files[WHEEL] = wheel
    index_server.ranges = False
    found = shipped_kernels("vllm==0.99.0")
    assert "whole wheel" in found.verified
    assert list((cache_root / "work").iterdir()) == []
    assert ReleaseCache().entries()["vllm==0.99.0@x86_64"].source_sha256 == hashlib.sha256(wheel).hexdigest()


def test_a_whole_wheel_with_another_hash_is_refused(index_server: Any, wheel: bytes) -> None:
    index_server.files[WHEEL] = wheel
    index_server.ranges = False
    index_server.wrong = lambda _, content: content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(DownloadError, match="sha256"):
        shipped_kernels("vllm==0.99.0")
    assert cached_kernels() == ()


def test_a_member_that_is_not_what_record_says_is_refused(index_server: Any, makers: Any, library: bytes) -> None:
    import io
    import zipfile

    good = makers.wheel({LIBRARY: library})
    kept = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(kept, "w") as new:
        for name in old.namelist():
            new.writestr(name, library + b"\0" if name == LIBRARY else old.read(name))
    index_server.files[WHEEL] = kept.getvalue()
    with pytest.raises(CubinError, match="RECORD"):
        shipped_kernels("vllm==0.99.0")


def test_an_unknown_release_lists_its_neighbours(index_server: Any, wheel: bytes) -> None:
    for version in ("0.26.0", "0.27.0", "0.28.0"):
        index_server.files[WHEEL.replace("0.99.0", version)] = wheel
    with pytest.raises(
        KernelNotFoundError, match=r"no vLLM 0\.27\.9 .* 0\.26\.0 to 0\.28\.0, near it 0\.26\.0, 0\.27\.0, 0\.28\.0"
    ):
        shipped_kernels("vllm==0.27.9")


def test_a_release_without_a_linux_wheel_names_its_files(index_server: Any, wheel: bytes) -> None:
    index_server.files["vllm-0.99.0-cp38-abi3-win_amd64.whl"] = wheel
    with pytest.raises(KernelNotFoundError, match="win_amd64"):
        shipped_kernels("vllm==0.99.0")


def test_the_wheel_of_the_other_machine_will_do(index_server: Any, wheel: bytes) -> None:
    index_server.files[WHEEL.replace("x86_64", "aarch64")] = wheel
    assert shipped_kernels("vllm==0.99.0").machine == "aarch64"
    assert shipped_kernels("vllm==0.99.0").from_cache


def test_code_for_a_gpu_that_only_the_other_machines_wheel_has(
    index_server: Any, makers: Any, library: bytes, standin_cubin: Any
) -> None:
    arm = makers.fatbin([[makers.entry(110, standin_cubin("sm_110")), makers.entry(90, standin_cubin("sm_90"))]])
    named = makers.object({".rodata": b"persistent_topk_kernel", ".nv_fatbin": arm})
    index_server.files[WHEEL] = makers.wheel({LIBRARY: library})
    index_server.files[WHEEL.replace("x86_64", "aarch64")] = makers.wheel({LIBRARY: named})
    assert shipped_kernels("vllm==0.99.0", arch=90).machine == "x86_64"
    other = shipped_kernels("vllm==0.99.0", arch=110)
    assert (other.machine, other.pick(110, 512, 4).sm) == ("aarch64", 110)
    before = len(index_server.requests)
    assert shipped_kernels("vllm==0.99.0", arch=110).from_cache
    nowhere = shipped_kernels("vllm==0.99.0", arch=75)
    assert nowhere.images == ()
    assert nowhere.labels == ("sm_80", "sm_90", "sm_120")
    assert len(index_server.requests) == before


def test_a_release_without_the_kernel_is_remembered(index_server: Any, makers: Any) -> None:
    index_server.files[WHEEL.replace("0.99.0", "0.19.1")] = makers.wheel(
        {LIBRARY: makers.object({".text": b"\xc3"})}, version="0.19.1"
    )
    for _ in range(2):
        with pytest.raises(KernelNotFoundError, match=r"the first release with one is 0\.20\.0"):
            shipped_kernels("vllm==0.19.1")
    assert len([path for path in index_server.sent() if path.startswith("/simple")]) == 1
    assert cached_kernels() == ()


def test_offline_and_not_cached_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DownloadError) as caught:
        shipped_kernels("vllm==0.27.1")
    assert "--kernel FILE.whl" in caught.value.help_text


def test_two_callers_download_once(index_server: Any, wheel: bytes) -> None:
    index_server.files[WHEEL] = wheel
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(shipped_kernels("vllm==0.99.0"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    assert len([path for path in index_server.sent() if path.startswith("/simple")]) == 1


def test_a_cubin_that_vanished_from_the_cache_is_fetched_again(index_server: Any, wheel: bytes, cache_root: Path) -> None:
    index_server.files[WHEEL] = wheel
    first = shipped_kernels("vllm==0.99.0")
    for path in list((cache_root / "shipped").rglob("*")):
        if path.is_file():
            path.unlink()
    again = shipped_kernels("vllm==0.99.0")
    assert not again.from_cache
    assert again.images == first.images


# ---------------------------------------------------------------------------------------------------------------------------------
# Sources for an audit


def test_members_of_a_release_are_kept_and_belong_to_the_same_entry(index_server: Any, wheel: bytes) -> None:
    index_server.files[WHEEL] = wheel
    wanted = {"vllm/v1/attention/backends/mla/indexer.py": b"native = 1\n"}
    assert release_members("vllm==0.99.0", ["vllm/**/indexer*.py"]) == wanted
    before = len(index_server.requests)
    assert release_members("vllm==0.99.0", ["*/indexer.py"]) == wanted
    assert release_members("vllm==0.99.0", ["no/such/*.py"]) == {}
    assert len(index_server.requests) == before
    assert shipped_kernels("vllm==0.99.0").pick(90, 512, 4)
    assert len(index_server.requests) > before
    assert release_members("vllm==0.99.0", ["*.py"]) == SOURCES
    entry = ReleaseCache().entries()["vllm==0.99.0@x86_64"]
    assert sorted(entry.members) == sorted(SOURCES)
    assert entry.cubins


def test_members_of_a_wheel_and_none_of_a_library(wheel: bytes, library: bytes, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(wheel)
    assert release_members(str(tmp_path / WHEEL), ["vllm/other.py"]) == {"vllm/other.py": b"x = 2\n"}
    (tmp_path / "l.so").write_bytes(library)
    with pytest.raises(KernelNotFoundError, match="no Python sources"):
        release_members(str(tmp_path / "l.so"), ["*.py"])


def test_a_large_source_is_an_error_and_not_a_surprise(makers: Any, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(makers.wheel({"vllm/huge.py": b"#" * (9 << 20)}))
    with pytest.raises(CubinError, match=r"huge\.py"):
        release_members(str(tmp_path / WHEEL), ["*.py"])


# ---------------------------------------------------------------------------------------------------------------------------------
# The installed vLLM


def test_the_installed_vllm_is_read_without_importing_it(
    library: bytes, makers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    package = site / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "indexer.py").write_text("x = 1\n")
    (package / "_C_stable_libtorch.abi3.so").write_bytes(library)
    (package / "_C.abi3.so").write_bytes(makers.object({".text": b"\xc3"}))
    info = site / "vllm-0.26.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    monkeypatch.syspath_prepend(str(site))
    found = shipped_kernels("installed", arch=90)
    assert (found.origin, found.release, found.library) == ("installed", "0.26.0", "vllm/_C_stable_libtorch.abi3.so")
    assert found.pick(90, 512, 4).origin == "installed"
    assert release_members("installed", ["vllm/indexer*.py"]) == {"vllm/indexer.py": b"x = 1\n"}


def _installed(site: Path, libraries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    package = site / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name, raw in libraries.items():
        (package / name).write_bytes(raw)
    info = site / "vllm-0.26.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    monkeypatch.syspath_prepend(str(site))


def _unreadable(makers: Any, cubin: bytes, sm: int = 90) -> bytes:
    """A library with the kernel's name and one entry that does not unpack."""
    raw: bytes = makers.object(
        {".nv_fatbin": makers.fatbin([[makers.entry(sm, b"\0" * 64, size=len(cubin))]]), ".rodata": b"persistent_topk_kernel"}
    )
    return raw


def test_a_library_that_cannot_be_unpacked_does_not_stop_the_search_in_the_others(
    library: bytes, makers: Any, standin_cubin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = _unreadable(makers, standin_cubin("sm_90"))
    _installed(tmp_path / "site", {"_C_stable_libtorch.abi3.so": bad, "_C.abi3.so": library}, monkeypatch)
    found = shipped_kernels("installed", arch=90)
    assert found.library == "vllm/_C.abi3.so"
    assert found.pick(90, 512, 4).sm == 90
    assert any("_C_stable_libtorch" in note for note in found.notes)


def test_where_the_kernel_was_not_found_what_could_not_be_read_is_the_answer(
    makers: Any, standin_cubin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = _unreadable(makers, standin_cubin("sm_90"))
    _installed(tmp_path / "site", {"_C_stable_libtorch.abi3.so": bad}, monkeypatch)
    with pytest.raises(CubinError, match="could not be unpacked"):
        shipped_kernels("installed", arch=90)
    # Nothing of the failure is remembered as an absence.
    with pytest.raises(CubinError, match="could not be unpacked"):
        shipped_kernels("installed", arch=90)


def test_code_for_other_gpus_that_cannot_be_read_is_no_matter(makers: Any, standin_cubin: Any, tmp_path: Path) -> None:
    good = makers.zstd(standin_cubin("sm_90"))
    entries = [
        makers.entry(80, b"\0" * 64, size=4096),
        makers.entry(90, good, size=len(standin_cubin("sm_90"))),
    ]
    file = tmp_path / "lib.so"
    file.write_bytes(makers.object({".nv_fatbin": makers.fatbin([entries])}))
    found = shipped_kernels(str(file), arch=90)
    assert (found.labels, found.notes) == (("sm_80", "sm_90"), ())
    assert found.pick(90, 512, 4).sm == 90
    everything = shipped_kernels(str(file))
    assert {image.sm for image in everything.images} == {90}
    assert "could not be unpacked" in everything.notes[0]
    assert everything.labels == ("sm_90",)
    with pytest.raises(KernelNotFoundError, match="not read"):
        everything.pick(80, 512, 4)


def test_the_only_code_for_this_gpu_that_cannot_be_read_is_an_error(makers: Any, standin_cubin: Any, tmp_path: Path) -> None:
    entries = [makers.entry(80, b"\0" * 64, size=4096), makers.entry(90, standin_cubin("sm_90"))]
    file = tmp_path / "lib.so"
    file.write_bytes(makers.object({".nv_fatbin": makers.fatbin([entries])}))
    with pytest.raises(CubinError, match="sm_80"):
        shipped_kernels(str(file), arch=80)


def test_no_installed_vllm_is_said() -> None:
    try:
        from importlib import metadata

        metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        with pytest.raises(KernelNotFoundError, match="not installed"):
            shipped_kernels("installed")
    else:
        pytest.skip("vLLM is installed here")


# ---------------------------------------------------------------------------------------------------------------------------------
# Real releases


def _online() -> bool:
    try:
        socket.create_connection(("pypi.org", 443), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.release_wheel
@pytest.mark.parametrize(("version", "registers"), [("0.27.1", 64), ("0.28.0", 64), ("0.33.0", None), ("0.20.2", 64)])
def test_a_real_release_has_the_kernel_for_seven_architectures(
    version: str, registers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _online():
        pytest.skip("offline: the package index cannot be reached")
    found = shipped_kernels(f"vllm=={version}")
    assert found.labels == ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
    assert len(found.images) == 7 * 9
    assert {image.params_size for image in found.images} == {56}
    assert {image.sm: image.params_base for image in found.images} == {
        75: 0x160, 80: 0x160, 86: 0x160, 89: 0x160, 90: 0x210, 100: 0x380, 120: 0x380,
    }  # fmt: skip
    assert {image.static_smem for image in found.images} == {0}
    image = found.pick(120, 512, 4)
    assert image.function == "_ZN4vllm10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_20PersistentTopKParamsE"
    if registers is not None:
        assert image.registers == registers
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a network connection was attempted"))
    assert shipped_kernels(f"vllm=={version}", arch=120).from_cache


@pytest.mark.release_wheel
def test_a_real_release_without_the_kernel() -> None:
    if not _online():
        pytest.skip("offline: the package index cannot be reached")
    with pytest.raises(KernelNotFoundError, match=r"_C.*the first release with one is 0\.20\.0"):
        shipped_kernels("vllm==0.19.1")
