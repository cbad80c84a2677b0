"""A build in which no GPU code could be read is not one without the kernel; an address that is none is a usage error."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from dsv4_repro.errors import UsageError
from dsv4_repro.forensics.audit.targets import open_target

ABOUT = {
    "vllm-9.9.9.dist-info/METADATA": b"Name: vllm\nVersion: 9.9.9\n",
    "vllm-9.9.9.dist-info/WHEEL": b"Tag: cp38-abi3-manylinux_2_31_x86_64\n",
}
LIBRARIES = {
    "no library": {},
    "a library of Windows": {"vllm/_C.pyd": b"MZ"},
    "a library cut to its first bytes": {"vllm/_C.abi3.so": b"\x7fELF"},
    "an empty library": {"vllm/_C.abi3.so": b""},
    "a text": {"vllm/_C.abi3.so": b"version https://git-lfs.github.com/spec/v1\n"},
    "two of a name": {"vllm/_C.abi3.so": b"\x7fELF", "vllm/_C_stable_libtorch.abi3.so": b"\x7fELF"},
}


@pytest.mark.parametrize("members", LIBRARIES)
def test_it_is_unread_not_absent(members: str, tmp_path: Path) -> None:
    path = tmp_path / "vllm-9.9.9-cp38-abi3-manylinux_2_31_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**ABOUT, **LIBRARIES[members]}.items():
            archive.writestr(name, content)
    for _ in range(2):  # the second time from the cache
        opened = open_target(str(path))
        assert opened.kernels is None
        assert opened.absent == ""
        assert any("no GPU code that could be read" in item.why for item in opened.unread)


@pytest.mark.parametrize("text", ["https://[::bad", "http://[", "https://x]/vllm-1-py3-none-any.whl", "https://", "http://\u202e/"])
def test_no_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        open_target(text)
