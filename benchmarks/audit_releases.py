"""The figures of docs/audit.md: every release from 0.19.1 on, audited; time, memory and the table. Or the fingerprints of known
builds.

    python benchmarks/audit_releases.py 'vllm>=0.19.1,<0.34' --out table.txt
    python benchmarks/audit_releases.py --fingerprints > forensics/audit/known_builds_data.py

Run from a checkout with the package importable. Needs the package index (about 60 MB a release) unless the cache has the releases.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
import time
from pathlib import Path

from packaging.version import Version

from dsv4_repro.errors import ReproError
from dsv4_repro.forensics.audit.build_audit import AuditOptions, assemble, audit_build
from dsv4_repro.forensics.audit.known_builds import PYTHON_FILES, python_fingerprint
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.table import report_lines
from dsv4_repro.forensics.audit.targets import expand_targets, open_target
from dsv4_repro.kernels.releases import find_wheel, open_wheel
from dsv4_repro.kernels.shipped import LIKELY_LIBRARIES, shipped_kernels

RANGE = "vllm>=0.19.1,<0.34"


def audit_all(targets: list[str], details: bool) -> list[str]:
    """Audits every target; the report's lines with seconds and peak memory."""
    start = time.perf_counter()
    builds = []
    lines = []
    for name in expand_targets(targets):
        before, cpu = time.perf_counter(), time.process_time()
        opened = open_target(name)
        build = audit_build(opened, AuditOptions(recipe=Recipe()))
        del opened
        gc.collect()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        lines.append(f"{name}: {time.perf_counter() - before:.1f} s, {time.process_time() - cpu:.1f} s of CPU, peak {peak} MiB")
        print(lines[-1], file=sys.stderr, flush=True)
        builds.append(build)
    report = assemble(builds, Recipe(), time.perf_counter() - start)
    return [*report_lines(report, Recipe().lines(), details=details), *lines]


def _library_cubins(version: str, machine: str) -> tuple[dict[str, list[str]], str]:
    """Architecture to sha256 of the cubins, and the fingerprint of the Python files, of one published wheel."""
    candidate, name = find_wheel(Version(version), machines=(machine,))
    with tempfile.TemporaryDirectory() as folder, open_wheel(candidate, name, Path(folder)) as opened:
        members = {item: opened.wheel.read(item) for item in opened.wheel.matching(PYTHON_FILES)}
        for pattern in LIKELY_LIBRARIES:
            for item in opened.wheel.matching((pattern,)):
                path = Path(folder) / "library.so"
                with path.open("wb") as stream:
                    opened.wheel.extract(item, stream)
                try:
                    found = shipped_kernels(str(path))
                except ReproError:
                    continue
                cubins: dict[str, list[str]] = {}
                for image in found.images:
                    cubins.setdefault(f"sm_{image.sm}", []).append(image.cubin_sha256)
                return {arch: sorted(set(digests)) for arch, digests in cubins.items()}, python_fingerprint(members)
        return {}, python_fingerprint(members)


def fingerprints(versions: list[str]) -> list[str]:
    """The module ``known_builds_data``: cubin to releases, and release to Python fingerprint."""
    by_cubin: dict[str, set[str]] = {}
    python: dict[str, set[str]] = {}
    for version in versions:
        for machine in ("x86_64", "aarch64"):
            try:
                cubins, code = _library_cubins(version, machine)
            except ReproError as error:
                print(f"{version} {machine}: {error}", file=sys.stderr)
                continue
            python.setdefault(version, set()).add(code)
            for digests in cubins.values():
                for digest in digests:
                    by_cubin.setdefault(digest[:24], set()).add(version)
            print(f"{version} {machine}: {len(cubins)} architectures", file=sys.stderr)
    groups: dict[tuple[str, ...], list[str]] = {}
    for digest, of in by_cubin.items():
        groups.setdefault(tuple(sorted(of, key=Version)), []).append(digest)
    lines = [
        '"""Digests of published releases, as ``benchmarks/audit_releases.py --fingerprints`` read them from their wheels."""',
        "",
    ]
    lines += ["from __future__ import annotations", "", '__all__ = ["CUBINS", "PYTHON"]', ""]
    lines += [
        "#: Releases whose wheels (x86-64 or aarch64) hold a cubin, to the first 24 hex digits of its sha256.",
        "CUBINS: dict[tuple[str, ...], tuple[str, ...]] = {",
    ]
    for versions_of, digests in sorted(groups.items(), key=lambda item: [Version(text) for text in item[0]]):
        lines.append(f"    {versions_of!r}: (")
        for position in range(0, len(digests), 4):
            lines.append("        " + ", ".join(f'"{item}"' for item in sorted(digests)[position : position + 4]) + ",")
        lines.append("    ),")
    lines += [
        "}",
        "",
        "#: Release to the fingerprint of its Python files (known_builds.python_fingerprint).",
        "PYTHON: dict[str, tuple[str, ...]] = {",
    ]
    lines += [
        f"    {version!r}: {tuple(sorted(codes))!r},"
        for version, codes in sorted(python.items(), key=lambda item: Version(item[0]))
    ]
    lines.append("}")
    return [line.replace("'", '"') for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=[RANGE])
    parser.add_argument("--fingerprints", action="store_true")
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.fingerprints:
        versions = [text.removeprefix("vllm==") for text in expand_targets(arguments.targets)]
        lines = fingerprints(versions)
    else:
        lines = audit_all(arguments.targets, arguments.details)
    text = "\n".join(lines) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
