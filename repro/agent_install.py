"""``agent install``: the agent into a server's environment, or into a folder for PYTHONPATH.

The agent is a distribution of its own; its sources lie beside this module as data. The wheel is made here from them (it is pure
Python), so that nothing is fetched; pip of the server's own interpreter installs it, and is asked afterwards whether it is there.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import shlex
import subprocess
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OurFaultError, ReproError, UnavailableError, UsageError
from .atomic import disk_error

__all__ = ["AGENT_SOURCES", "Installed", "agent_wheel", "install_into_folder", "install_with_python"]

AGENT_SOURCES = Path(__file__).resolve().parent / "agent"
GROUP = "vllm.general_plugins"
TIMEOUT_S = 120.0
_PROBE = """
import importlib.util, json, sys
from importlib.metadata import PackageNotFoundError, entry_points, version
def of(name):
    try: return version(name)
    except PackageNotFoundError: return None
print(json.dumps({"python": list(sys.version_info[:3]), "pip": importlib.util.find_spec("pip") is not None, "vllm": of("vllm"),
    "torch": of("torch"), "agent": of("dsv4-repro-agent"),
    "entry_points": [one.value for one in entry_points(group="vllm.general_plugins")]}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """What was done. ``where``: interpreter or folder. ``vllm``: the version beside it; None: none, or not looked for."""

    way: str
    where: str
    version: str
    vllm: str | None
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a person: what was done, and how the server is started now."""
        prefix = f"PYTHONPATH={shlex.quote(self.where)} " if self.way == "folder" else ""
        return [
            f"agent {self.version} installed: {self.where}",
            *self.notes,
            "It stays inert until it is asked for, by the server's environment:",
            f"  {prefix}DSV4_REPRO_AGENT=1 vllm serve …    flight recorder, row states on request",
            f"  {prefix}DSV4_REPRO_GUARD=1 vllm serve …    and the producer's clamp, where the build lacks it",
            f"  {prefix}DSV4_REPRO_RESCUE=1 vllm serve …   and release of the known wait from inside",
            "Through Ray set the same names with VLLM_ in front. Run on vLLM 0.23.0 with H200 cards only: docs/agent.md.",
        ]


def agent_wheel(sources: Path = AGENT_SOURCES) -> tuple[str, bytes]:
    """File name and bytes of the agent's wheel, the same bytes each time. OurFaultError where its sources are not beside us."""
    try:
        project = tomllib.loads((sources / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        readme = (sources / "README.md").read_text(encoding="utf-8")
        modules = {path.name: path.read_bytes() for path in sorted((sources / "src" / "dsv4_repro_agent").glob("*.py"))}
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise OurFaultError(f"the agent's sources are not where they belong: {sources}: {error}") from None
    if "__init__.py" not in modules:
        raise OurFaultError(f"the agent's sources are not where they belong: {sources}")
    name, version = project["name"].replace("-", "_"), project["version"]
    info = f"{name}-{version}.dist-info"
    points = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    files = {f"{name}/{module}": raw for module, raw in modules.items()}
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.3\nName: {project['name']}\nVersion: {version}\nSummary: {project['description']}\n"
        f"Requires-Python: {project['requires-python']}\nLicense-Expression: {project['license']}\n"
        f"Description-Content-Type: text/markdown\n\n{readme}"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: dsv4-repro\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = points.encode()
    record = "".join(f"{path},{_digest(raw)},{len(raw)}\n" for path, raw in files.items()) + f"{info}/RECORD,,\n"
    files[f"{info}/RECORD"] = record.encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, raw in files.items():
            entry = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, raw)
    return f"{name}-{version}-py3-none-any.whl", packed.getvalue()


def _digest(raw: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()


def _version(wheel: str) -> str:
    return wheel.split("-")[1]


def install_into_folder(folder: Path) -> Installed:
    """Unpack the agent into ``folder`` for PYTHONPATH; an agent that is there is replaced.

    Raises UsageError: something else of the same name is there, or the folder is a file or cannot be written. RunStoreError: the
    disk is full.
    """
    name, raw = agent_wheel()
    package = folder / "dsv4_repro_agent"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if package.exists() and not (package / "plugin.py").is_file():
            raise UsageError(f"{package} is there and is no agent", help_text="Name another folder: --into DIR")
        for stale in [*package.glob("*.py"), *folder.glob("dsv4_repro_agent-*.dist-info/*")]:
            stale.unlink()
        for old in folder.glob("dsv4_repro_agent-*.dist-info"):
            old.rmdir()
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            archive.extractall(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_error(error, folder, "install the agent") from None
        raise UsageError(f"cannot install into {folder}: {error.strerror or error}", help_text="Name another: --into DIR") from None
    return Installed("folder", str(folder.resolve()), _version(name), None, ())


def _call(command: list[str], doing: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]}: {doing}: {error}") from None


def _probe(python: Path) -> dict[str, Any]:
    done = _call([str(python), "-c", _PROBE], "cannot be asked what it has")
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = None
    if done.returncode or not isinstance(document, dict):
        raise UsageError(
            f"{python} is no Python interpreter that answers (exit status {done.returncode}): {done.stderr.strip()[-300:]}",
            help_text="Give the interpreter that runs vLLM: dsv4-repro agent install --python /path/to/venv/bin/python",
        )
    return document


def install_with_python(python: Path, scratch: Path) -> Installed:
    """Install the agent with the pip of ``python``; ``scratch``: an empty folder for the wheel. Nothing is fetched.

    Raises UsageError (no interpreter), UnavailableError (too old, no pip, pip refused: its own words).
    """
    other_way = "Without pip: dsv4-repro agent install --into DIR, then PYTHONPATH=DIR in the server's environment."
    before = _probe(python)
    if before["python"] < [3, 10]:
        raise UnavailableError(f"{python} is Python {before['python']}, the agent needs 3.10")
    if not before["pip"]:
        raise UnavailableError(f"{python} has no pip", help_text=other_way)
    name, raw = agent_wheel()
    wheel = scratch / name
    wheel.write_bytes(raw)
    flags = ["--no-deps", "--no-index", "--force-reinstall", "--disable-pip-version-check", "--no-input", "-q"]
    done = _call([str(python), "-m", "pip", "install", *flags, str(wheel)], "pip")
    if done.returncode:
        raise UnavailableError(f"pip of {python} refused: {done.stderr.strip()[-600:]}", help_text=other_way)
    after = _probe(python)
    if after["agent"] != _version(name) or "dsv4_repro_agent:register" not in after["entry_points"]:
        raise ReproError(f"pip of {python} said that it installed the agent, but it is not there", help_text=other_way)
    notes = () if after["vllm"] else (f"There is no vLLM beside {python}: is it the interpreter that runs the server?",)
    return Installed("pip", str(python), _version(name), after["vllm"], notes)
