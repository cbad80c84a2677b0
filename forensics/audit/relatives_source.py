"""Related defects that are visible in source text: FlashInfer's top-k (shipped as headers), and the sentinel fill of a caller's
buffer."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import DownloadError, ReproError
from .release_source import ReleaseSource
from .verdicts import RelativeFinding

__all__ = ["FLASHINFER_HEADER", "fetch_flashinfer_header", "flashinfer_findings", "flashinfer_version", "sentinel_fill"]

FLASHINFER_HEADER = "flashinfer/data/include/flashinfer/topk.cuh"
_PIN = re.compile(rb"^Requires-Dist:\s*flashinfer-python\s*\(?==\s*([0-9A-Za-z.+!-]{1,40})\)?", re.MULTILINE)
_MAX_HEADER = 4 << 20


def flashinfer_version(members: Mapping[str, bytes]) -> str | None:
    """The FlashInfer version that the build's metadata pins, None if it pins none."""
    for name, raw in members.items():
        if name.endswith(".dist-info/METADATA"):
            match = _PIN.search(raw[: 1 << 20])
            if match is not None:
                return match[1].decode("ascii", "replace")
    return None


def fetch_flashinfer_header(version: str) -> str:
    """FlashInfer's top-k header out of its wheel on the configured index, read in ranges. DownloadError, KernelNotFoundError."""
    import tempfile
    from pathlib import Path

    from packaging.version import Version

    from ...kernels.cache import Cache, content_key
    from ...kernels.package_index import list_wheels, pip_settings
    from ...kernels.releases import open_wheel

    store = Cache("flashinfer")
    key = content_key("topk.cuh", version)
    kept = store.load(key)
    if kept is not None:
        return kept.decode("utf-8", "replace")
    settings = pip_settings()
    wanted = Version(version)
    found = [item for item in list_wheels("flashinfer-python", settings) if item.version == wanted]
    if not found:
        raise DownloadError(f"the configured index offers no wheel of flashinfer-python {version}")
    with (
        tempfile.TemporaryDirectory(prefix="dsv4-repro-") as folder,
        open_wheel(found[0], "any", Path(folder), settings=settings) as opened,
    ):
        raw = opened.wheel.read(FLASHINFER_HEADER, _MAX_HEADER)
    store.store(key, raw)
    return raw.decode("utf-8", "replace")


def _code_lines(text: str) -> list[tuple[int, str]]:
    """(line number, code) without comments and blank lines."""
    bare = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    lines = [(number, re.sub(r"//.*", "", line).strip()) for number, line in enumerate(bare.splitlines(), 1)]
    return [(number, line) for number, line in lines if line]


def flashinfer_findings(version: str | None, header: Callable[[str], str] = fetch_flashinfer_header) -> list[RelativeFinding]:
    """The reset race (#3610) and the arrival order (#4131) in the FlashInfer release that the build pins."""
    names = (("reset race", "flashinfer#3610"), ("arrival order", "flashinfer#4131"))
    if version is None:
        why = "the build's metadata pins no FlashInfer release"
        return [RelativeFinding(name=name, number=number, word="CANNOT TELL", how="source", why=why) for name, number in names]
    try:
        lines = _code_lines(header(version))
    except ReproError as error:
        return [
            RelativeFinding(name=name, number=number, word="CANNOT TELL", how="source", why=str(error)) for name, number in names
        ]
    return [_reset_race(version, lines), _arrival_order(version, lines)]


def _enclosing(lines: list[tuple[int, str]], at: int) -> list[str]:
    """Conditions of the braces around a line, innermost first."""
    depth = 0
    found: list[str] = []
    for position in range(at - 1, max(at - 400, -1), -1):
        line = lines[position][1]
        depth += line.count("}") - line.count("{")
        if depth < 0:
            found.append(line)
            depth = 0
            if re.search(r"__global__|__forceinline__|\)\s*\{$", line) and not re.match(r"(if|for|while|else|\})", line):
                break
    return found


def _reset_race(version: str, lines: list[tuple[int, str]]) -> RelativeFinding:
    common: dict[str, Any] = {"name": "reset race", "number": "flashinfer#3610", "how": "source"}
    by_leader: list[str] = []
    by_last: list[str] = []
    for position, (number, line) in enumerate(lines):
        if re.search(r"arrival_counter\s*(,\s*0\s*\)|=\s*0\s*;)", line):
            around = " ".join(_enclosing(lines, position))
            shown = f"topk.cuh:{number} {line}"
            if "last" in around:
                by_last.append(shown)
            elif "cta_in_group == 0" in around:
                by_leader.append(shown)
    where = f"flashinfer-python {version}"
    if by_leader:
        why = (
            f"{where}: the leading CTA zeroes the counter while a member may still poll its last wait; the member then waits "
            f"for ever"
        )
        return RelativeFinding(**common, word="VULNERABLE", why=why, evidence=tuple(by_leader[:3]))
    if by_last:
        why = f"{where}: the counter is zeroed by the CTA that leaves last"
        return RelativeFinding(**common, word="HOLDS", why=why, evidence=tuple(by_last[:3]))
    return RelativeFinding(
        **common, word="CANNOT TELL", why=f"{where}: no reset of an arrival counter was found in its top-k header"
    )


def _arrival_order(version: str, lines: list[tuple[int, str]]) -> RelativeFinding:
    """Calls of the group barrier in front of which other threads' writes are not ordered by a CTA barrier."""
    common: dict[str, Any] = {"name": "arrival order", "number": "flashinfer#4131", "how": "source"}
    where = f"flashinfer-python {version}"
    start = next((p for p, (_, line) in enumerate(lines) if "void AdvanceRadixGroupBarrier(" in line), None)
    if start is None:
        return RelativeFinding(**common, word="CANNOT TELL", why=f"{where}: no group barrier of that name in its top-k header")
    body = []
    for _, line in lines[start:]:
        body.append(line)
        if line == "}":
            break
    text = " ".join(body)
    if text.find("__syncthreads") != -1 and text.find("__syncthreads") < text.find("red_release"):
        return RelativeFinding(
            **common, word="HOLDS", why=f"{where}: the barrier converges the CTA before it publishes its arrival"
        )
    loose: list[str] = []
    calls = 0
    for position, (number, line) in enumerate(lines):
        if line.startswith("AdvanceRadixGroupBarrier(") and line.endswith(";"):
            calls += 1
            for _, before in reversed(lines[max(0, position - 25) : position]):
                if "__syncthreads" in before or before.startswith("AdvanceRadixGroupBarrier("):
                    break
                if re.match(r"for\s*\(.*=\s*tx\s*;", before):
                    loose.append(f"topk.cuh:{number}")
                    break
    if loose:
        why = (
            f"{where}: {len(loose)} of {calls} barrier calls follow a loop over all threads with no CTA barrier in between: "
            f"thread 0 arrives while others still write"
        )
        return RelativeFinding(**common, word="VULNERABLE", why=why, evidence=tuple(loose[:6]))
    return RelativeFinding(**common, word="HOLDS", why=f"{where}: every barrier call found follows a CTA barrier")


def sentinel_fill(source: ReleaseSource) -> RelativeFinding:
    """#55299: is a caller's index buffer filled with -1 before only the valid prefix of each row is written?

    Judged from the syntax tree: a function that takes ``out`` and hands its first part to a kernel as ``combined_indices``.
    """
    common: dict[str, Any] = {"name": "sentinel fill", "number": "vllm#55299", "how": "syntax"}
    for path in sorted(source.members):
        if (
            not path.endswith(".py")
            or b"combined_indices" not in source.members[path]
            or any(word in path for word in ("/amd/", "xpu", "rocm"))
        ):
            continue
        tree = source.tree(path)
        for node in tree.body if tree is not None else ():
            if not isinstance(node, ast.FunctionDef) or "combined_indices" not in ast.unparse(node):
                continue
            names = {item.arg for item in (*node.args.args, *node.args.kwonlyargs)}
            own = [
                item
                for item in ast.walk(node)
                if isinstance(item, ast.Call) and ast.unparse(item.func).endswith("combined_indices.fill_")
            ]
            taken = [
                item
                for item in ast.walk(node)
                if isinstance(item, ast.Assign)
                and "combined_indices" in ast.unparse(item.targets[0])
                and ast.unparse(item.value) == "out"
            ]
            if "out" not in names or not taken:
                continue
            where = f"{path}:{taken[0].lineno}"
            if own and [ast.unparse(arg) for arg in own[0].args] == ["-1"]:
                return RelativeFinding(
                    **common, word="HOLDS", why=f"a caller's buffer is filled with -1 ({path}:{own[0].lineno})", evidence=(where,)
                )
            why = f"a caller's buffer is taken as it is ({where}): what lies behind the valid prefix of a row is read as an index"
            return RelativeFinding(**common, word="VULNERABLE", why=why, evidence=(where,))
    gap = source.unreadable(b"combined_indices")
    if gap:
        return RelativeFinding(**common, word="CANNOT TELL", why=gap)
    return RelativeFinding(
        **common, word="NOT PRESENT", why="no combined index buffer with a caller's memory in the release's Python"
    )
