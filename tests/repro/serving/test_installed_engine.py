"""Whose vLLM an interpreter would start, asked without importing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.serving.installed_engine import EngineInstall, engine_install, engine_kernel


def _environment(tmp_path: Path, version: str | None) -> dict[str, str]:
    """A folder with a package vllm that must not be imported, and its distribution."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    if version is not None:
        info = tmp_path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(("version", "release"), [("0.23.0", "0.23.0"), ("0.23.1.dev5+gabc", None), ("0.27.1+cu130", None)])
def test_the_release_is_what_the_distribution_claims_and_a_build_has_none(
    tmp_path: Path, version: str, release: str | None
) -> None:
    found = engine_install(sys.executable, _environment(tmp_path, version))
    assert (found.version, found.release, found.folder) == (version, release, tmp_path / "vllm")
    assert version in found.words
    assert bool(found.unread) == (release is None)


def test_a_folder_without_a_distribution_is_no_release(tmp_path: Path) -> None:
    found = engine_install(sys.executable, _environment(tmp_path, None))
    assert found.folder == tmp_path / "vllm"
    assert found.release is None
    assert "not known" in found.words


@pytest.mark.parametrize("script", ["exit 3", "echo words", "echo '[1]'", "echo '{\"vllm\": 7}'"])
def test_an_interpreter_that_answers_nonsense_is_unread(tmp_path: Path, script: str) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    found = engine_install(str(fake), {})
    assert found.folder is None
    assert found.unread
    assert isinstance(engine_kernel(found, 90, 2048, 4), Unread)


def test_no_interpreter_is_unread() -> None:
    found = engine_install("/nonexistent/python", {})
    assert "does not answer" in found.unread[0].why


def test_a_folder_without_code_has_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"\x7fELF nothing")
    kernel = engine_kernel(EngineInstall("python", folder=tmp_path), 90, 2048, 4)
    assert isinstance(kernel, Unread)
    assert "_C.abi3.so" in kernel.why


def test_every_library_that_could_not_be_read_is_named(tmp_path: Path) -> None:
    for name in ("_C.abi3.so", "_C_stable_libtorch.abi3.so"):
        (tmp_path / name).write_bytes(b"\x7fELF nothing")
    kernel = engine_kernel(EngineInstall("python", folder=tmp_path), 90, 2048, 4)
    assert isinstance(kernel, Unread)
    assert "_C.abi3.so" in kernel.why
    assert "_C_stable_libtorch.abi3.so" in kernel.why
