"""Makers of what the shipped-kernel tests read: cubins (NVRTC, source below), fat binaries, objects, wheels, an index server.

All content is made here; nothing is taken from a release.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import re
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

#: A stand-in with the shipped kernel's name pattern, parameter size and launch bounds, and 256 bytes of static shared memory.
STANDIN = """
namespace standin { namespace persistent {
struct Params { const float* in; int* out; const int* lengths; void* state; unsigned a, b, c, d, e, f; };
template <int K, unsigned V>
__global__ void __launch_bounds__(1024, 2) persistent_topk_kernel(Params p) {
  __shared__ int s[64];
  extern __shared__ float dynamic[];
  s[threadIdx.x & 63] = p.lengths[p.a];
  dynamic[threadIdx.x] = p.in[p.b] + K;
  __syncthreads();
  p.out[threadIdx.x] = s[threadIdx.x % V] + dynamic[threadIdx.x ^ 1];
}
template __global__ void persistent_topk_kernel<512, 4>(Params);
template __global__ void persistent_topk_kernel<1024, 2>(Params);
} }
"""
OTHER = 'extern "C" __global__ void scale(float* x, float by, long long n) { long long i = threadIdx.x; if (i < n) x[i] *= by; }'


@lru_cache(maxsize=64)
def compile_cubin(arch: str, source: str) -> bytes:
    """NVRTC's cubin of ``source`` for ``sm_90a`` and the like."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, arch
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    raw: bytes = b" " * size
    nvrtc.nvrtcGetCUBIN(program, raw)
    nvrtc.nvrtcDestroyProgram(program)
    return raw


@pytest.fixture(scope="session")
def standin_cubin() -> Callable[[str], bytes]:
    """``standin_cubin("sm_120")``: a cubin with <512,4> and <1024,2>."""
    return lambda arch: compile_cubin(arch, STANDIN)


@pytest.fixture(scope="session")
def other_cubin() -> Callable[[str], bytes]:
    """A cubin without the kernel."""
    return lambda arch: compile_cubin(arch, OTHER)


def zstd_frame(raw: bytes) -> bytes:
    """A zstd frame of raw blocks (RFC 8878): valid, not smaller."""
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(raw))
    pieces = [raw[start : start + 65536] for start in range(0, len(raw), 65536)] or [b""]
    for number, piece in enumerate(pieces):
        head = len(piece) << 3 | (number == len(pieces) - 1)
        frame += head.to_bytes(3, "little") + piece
    return frame


def zstd_bomb(size: int, announced: int | None = None) -> bytes:
    """A frame of RLE blocks that unpacks to ``size`` zero bytes; its header announces ``announced``."""
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size if announced is None else announced)
    left = size
    while left:
        count = min(left, 1 << 17)
        left -= count
        frame += (count << 3 | 1 << 1 | (left == 0)).to_bytes(3, "little") + b"\0"
    return frame


@dataclass(frozen=True)
class Packed:
    """An entry to put into a fat binary. ``payload``: as stored; ``size``: unpacked, None for an entry that is not compressed."""

    sm: int
    payload: bytes
    suffix: str = ""
    size: int | None = None
    kind: int = 2


def pack_entry(entry: Packed) -> bytes:
    flags = 0x11 | {"": 0, "a": 0x100000, "f": 0x200000}[entry.suffix] | (0x8000 if entry.size is not None else 0)
    padded = entry.payload + b"\0" * (-len(entry.payload) % 8)
    packed = len(entry.payload) if entry.size is not None else 0
    head = struct.pack(
        "<HHIQIIHHIIIQQQ", entry.kind, 0x101, 64, len(padded), packed, 0, 8, 1, entry.sm, 0, 0, flags, 0, entry.size or 0
    )
    return head + padded


def pack_fatbin(containers: Sequence[Sequence[Packed]]) -> bytes:
    """A fat binary: one container a translation unit."""
    whole = b""
    for entries in containers:
        body = b"".join(map(pack_entry, entries))
        whole += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return whole


def pack_object(sections: Mapping[str, bytes], machine: int = 62) -> bytes:
    """A little-endian ELF64 shared object with these sections (PROGBITS)."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body = b""
    headers = [struct.pack("<IIQQQQIIQQ", *([0] * 10))]
    offset = 64
    for name, content in {**sections, ".shstrtab": names}.items():
        kind = 3 if name == ".shstrtab" else 1
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQIIQQ", at, kind, 2, 0, offset + len(body), len(content), 0, 0, 8, 0))
        body += content + b"\0" * (-len(content) % 8)
    ident = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(headers), len(headers) - 1
    )
    return head + body + b"".join(headers)


#: What the host side of a library registers, in the clear.
HOST_NAME = b"\0_ZN7standin10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_6ParamsE\0"


@pytest.fixture(scope="session")
def library(standin_cubin: Callable[[str], bytes], other_cubin: Callable[[str], bytes]) -> bytes:
    """A shared object with three translation units: other code, the kernel for three architectures (two compressed), PTX only."""
    kernel = [standin_cubin(arch) for arch in ("sm_80", "sm_90", "sm_120")]
    fatbin = pack_fatbin(
        [
            [Packed(80, other_cubin("sm_80")), Packed(90, zstd_frame(other_cubin("sm_90")), size=len(other_cubin("sm_90")))],
            [
                Packed(80, kernel[0]),
                Packed(90, zstd_frame(kernel[1]), size=len(kernel[1])),
                Packed(120, zstd_frame(kernel[2]), size=len(kernel[2])),
            ],
            [Packed(90, b".version 8.8\n", kind=1)],
        ]
    )
    return pack_object({".text": b"\xc3" * 64, ".rodata": HOST_NAME, ".nv_fatbin": fatbin})


def pack_wheel(
    members: Mapping[str, bytes], *, version: str = "0.99.0", tag: str = "cp38-abi3-manylinux_2_28_x86_64", record: bool = True
) -> bytes:
    """A wheel of the package ``vllm`` with RECORD."""
    info = f"vllm-{version}.dist-info"
    everything = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    lines = []
    for name, content in everything.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    if record:
        everything[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in everything.items():
            archive.writestr(name, content)
    return kept.getvalue()


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user, for this test alone."""
    root = tmp_path / "cache"
    monkeypatch.setenv("DSV4_REPRO_CACHE", str(root))
    return root


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to connect fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a network connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@dataclass
class IndexServer:
    """A package index and its files on localhost. ``ranges``: whether it gives ranges. ``requests``: (path, Range header)."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    json: bool = True
    hashes: bool = True
    break_after: int | None = None
    wrong: Callable[[str, bytes], bytes] | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def sent(self) -> list[str]:
        return [path for path, _ in self.requests]


@pytest.fixture
def index_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """Serves ``/simple/vllm/`` and ``/files/NAME``; pip's settings point at it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def answer(
            self, status: int, body: bytes, kind: str, extra: Mapping[str, str] | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (extra or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None and cut < len(body):
                self.close_connection = True

        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("Range")))
            if self.path == "/simple/vllm/":
                self.index()
                return
            content = state.files.get(self.path.removeprefix("/files/"))
            if content is None:
                self.answer(404, b"no", "text/plain")
                return
            if state.wrong is not None:
                content = state.wrong(self.path, content)
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if state.ranges and match is not None:
                first, last = int(match[1]), min(int(match[2]), len(content) - 1)
                where = {"Content-Range": f"bytes {first}-{last}/{len(content)}", "ETag": '"fixed"'}
                self.answer(206, content[first : last + 1], "application/zip", where, state.break_after)
                return
            self.answer(200, content, "application/zip", cut=state.break_after)

        def index(self) -> None:
            if state.json:
                rows = [
                    {
                        "filename": name,
                        "url": f"../../files/{name}",
                        "hashes": {"sha256": hashlib.sha256(content).hexdigest()} if state.hashes else {},
                        "size": len(content),
                        "yanked": False,
                    }
                    for name, content in state.files.items()
                ]
                body = json.dumps({"meta": {"api-version": "1.1"}, "name": "vllm", "files": rows}).encode()
                self.answer(200, body, "application/vnd.pypi.simple.v1+json")
                return
            links = [
                f'<a href="../../files/{name}#sha256={hashlib.sha256(content).hexdigest()}">{name}</a>'
                for name, content in state.files.items()
            ]
            self.answer(200, ("<html>" + "\n".join(links) + "</html>").encode(), "text/html; charset=utf-8")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = IndexServer(f"http://127.0.0.1:{server.server_address[1]}")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{state.url}/simple")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="session")
def makers() -> SimpleNamespace:
    """The functions above, for tests (test modules are not importable from each other)."""
    return SimpleNamespace(
        compile=compile_cubin,
        entry=Packed,
        fatbin=pack_fatbin,
        object=pack_object,
        wheel=pack_wheel,
        zstd=zstd_frame,
        bomb=zstd_bomb,
    )
