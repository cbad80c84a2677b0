from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from dsv4_repro.errors import DownloadError
from dsv4_repro.kernels.package_index import (
    Connection,
    IndexSettings,
    choose_wheel,
    list_wheels,
    pip_settings,
    shown,
)


def test_settings_of_pip_with_the_environment_above_the_files() -> None:
    listing = """\
global.cert='/etc/ssl/company.pem'
global.extra-index-url='https://two.example/simple/\\nfile:///opt/pypi/simple'
global.index-url='https://files.example/simple'
global.proxy='http://proxy.example:3128'
install.index-url='https://install.example/simple'
nonsense
:env:.find-links='/opt/wheels https://links.example/'
"""
    settings = pip_settings({"PIP_INDEX_URL": "https://env.example/simple/"}, listing)
    assert settings.indexes == ("https://env.example/simple", "https://two.example/simple", "file:///opt/pypi/simple")
    assert settings.find_links == ("/opt/wheels", "https://links.example/")
    assert (settings.cert, settings.proxy) == ("/etc/ssl/company.pem", "http://proxy.example:3128")
    assert pip_settings({}, listing).indexes[0] == "https://install.example/simple"


def test_the_default_is_pypi_and_no_index_is_none() -> None:
    assert pip_settings({}, "").indexes == ("https://pypi.org/simple",)
    assert pip_settings({"PIP_NO_INDEX": "1"}, "").indexes == ()


def test_pip_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "https://asked.example/simple")
    assert pip_settings({}).indexes[0] == "https://asked.example/simple"


@pytest.mark.parametrize("as_json", [True, False])
def test_wheels_are_listed_from_json_and_from_html(index_server: Any, as_json: bool) -> None:
    index_server.json = as_json
    index_server.files = {
        "vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl": b"one",
        "vllm-0.27.1-1-cp38-abi3-manylinux_2_28_x86_64.whl": b"two",
        "vllm-0.27.1-cp38-abi3-manylinux_2_28_aarch64.whl": b"three",
        "vllm-0.27.1-cp38-abi3-macosx_12_0_arm64.whl": b"four",
        "vllm-0.27.1.tar.gz": b"five",
        "not a wheel.whl": b"six",
    }
    found = list_wheels("vllm", pip_settings())
    assert len(found) == 4
    chosen = choose_wheel(found, Version("0.27.1"), "x86_64")
    assert chosen is not None
    assert chosen.filename == "vllm-0.27.1-1-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert chosen.url == f"{index_server.url}/files/{chosen.filename}"
    assert len(chosen.sha256 or "") == 64
    other = choose_wheel(found, Version("0.27.1"), "aarch64")
    assert other is not None
    assert "aarch64" in other.filename
    assert choose_wheel(found, Version("0.27.2"), "x86_64") is None
    assert choose_wheel(found, Version("0.27.1"), "riscv64") is None


def test_an_index_without_the_package_is_no_failure(index_server: Any) -> None:
    settings = IndexSettings(indexes=(f"{index_server.url}/nothing", f"{index_server.url}/simple"))
    index_server.files = {"vllm-1.0-py3-none-manylinux_2_28_x86_64.whl": b"x"}
    assert len(list_wheels("vllm", settings)) == 1


def test_local_folders_and_file_indexes_need_no_network(tmp_path: Path, no_network: None) -> None:
    name = "vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    folder = tmp_path / "simple" / "vllm"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"x")
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / name.replace("0.27.1", "0.28.0")).write_bytes(b"y")
    settings = IndexSettings(
        indexes=((tmp_path / "simple").as_uri(),), find_links=(str(tmp_path / "links"), "https://links.example")
    )
    found = list_wheels("vllm", settings)
    assert sorted(str(candidate.version) for candidate in found) == ["0.27.1", "0.28.0"]
    assert all(candidate.url.startswith("file:") for candidate in found)


def test_no_connection_is_a_typed_error_that_names_the_address() -> None:
    settings = IndexSettings(indexes=("http://user:secret@127.0.0.1:9/simple",))
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9/simple/vllm/") as caught:
        list_wheels("vllm", settings)
    assert "secret" not in str(caught.value)


def test_no_index_and_no_folder_is_said() -> None:
    with pytest.raises(DownloadError, match="no index"):
        list_wheels("vllm", IndexSettings(indexes=()))


def test_credentials_and_queries_are_never_shown() -> None:
    assert shown("https://me:pw@host.example:8443/simple/vllm/?token=x#y") == "https://host.example:8443/simple/vllm/"


def test_other_schemes_are_refused() -> None:
    for url in ("ftp://host/x", "file:///etc/passwd", "data:text/plain,x", "/etc/passwd"):
        with pytest.raises(DownloadError), Connection(IndexSettings()).open(url):
            pass


def test_a_certificate_file_that_is_not_there_is_said() -> None:
    with pytest.raises(DownloadError, match="nowhere"):
        Connection(IndexSettings(cert="/nowhere/ca.pem"))


def test_an_index_that_is_no_json_is_said(index_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_repro.kernels import package_index

    monkeypatch.setattr(package_index.json, "loads", lambda _: (_ for _ in ()).throw(ValueError("x")))  # type: ignore[attr-defined]
    with pytest.raises(DownloadError, match="not the JSON"):
        list_wheels("vllm", pip_settings())
