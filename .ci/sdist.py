"""Build a source distribution, a wheel from it, and compare the wheel's files with the tree: a forgotten package shows here."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "forensics", "scenarios", "reports", "repro")
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, into: Path) -> Path:
    done = subprocess.run([sys.executable, "-c", BUILD, what, str(into)], cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{what}: {done.stderr[-2000:]}")
    return into / done.stdout.strip().splitlines()[-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = build("build_sdist", ROOT, folder)
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "unpacked", filter="data")
        (source,) = (folder / "unpacked").iterdir()
        wheel = build("build_wheel", source, folder)
        with zipfile.ZipFile(wheel) as packed:
            shipped = {entry for entry in packed.namelist() if ".dist-info/" not in entry}
    modules = [ROOT / "__init__.py", ROOT / "errors.py", ROOT / "clock.py"]
    modules += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if (path.parent / "__init__.py").exists()]
    expected = {f"dsv4_repro/{path.relative_to(ROOT)}" for path in modules if (ROOT / "repro" / "agent") not in path.parents}
    missing = expected - shipped
    strange = {entry for entry in shipped if not entry.startswith("dsv4_repro/") or entry.startswith("dsv4_repro/tests")}
    stale = {entry for entry in shipped if entry.endswith(".py") and not (ROOT / entry.removeprefix("dsv4_repro/")).exists()}
    if missing or strange or stale:
        sys.exit(f"missing from the wheel: {sorted(missing)}; strange: {sorted(strange)}; stale: {sorted(stale)}")
    sys.stdout.write(f"{wheel.name}: {len(shipped)} files\n")


if __name__ == "__main__":
    main()
