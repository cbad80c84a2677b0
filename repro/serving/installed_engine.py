"""Which vLLM a server's interpreter would start: release, folder, and the machine code of its top-k. vLLM is never imported.

The interpreter is asked where its ``vllm`` lies and what its distribution says; the cubin is then read from the shared objects in
that folder, as with ``--kernel installed`` for our own interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import ReproError
from ...forensics.device_state import Unread
from ..kernel_choice import ChosenKernel, choose_kernel, guard_of_release

__all__ = ["EngineInstall", "engine_install", "engine_kernel"]

TIMEOUT_S = 60.0
_MOST_ANSWER = 1 << 16
_PROBE = """
import importlib.util, json, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try: return version(name)
    except PackageNotFoundError: return None
spec = importlib.util.find_spec("vllm")
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "vllm": of("vllm"), "torch": of("torch"),
    "folder": list(spec.submodule_search_locations)[0] if spec and spec.submodule_search_locations else None}))
"""


@dataclass(frozen=True, slots=True)
class EngineInstall:
    """``release``: a number of the table of releases that the distribution claims, None for a build of its own or if not known.

    ``version``: what the distribution says, as it is. ``unread``: why something is not known.
    """

    python: str
    version: str | None = None
    release: str | None = None
    folder: Path | None = None
    torch: str | None = None
    unread: tuple[Unread, ...] = ()

    @property
    def words(self) -> str:
        """For a first line."""
        if self.version:
            return f"vLLM {self.version}"
        return "a vLLM whose release is not known" if self.folder is not None else "no vLLM was found"


def engine_install(python: str, env: Mapping[str, str]) -> EngineInstall:
    """Ask an interpreter, in the environment of the server. What it does not answer is an Unread, never an error."""
    what = "the server's vLLM"
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(env),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        document = json.loads(done.stdout[-_MOST_ANSWER:])
    except (OSError, subprocess.TimeoutExpired) as error:
        return EngineInstall(python, unread=(Unread(what, f"{python} does not answer: {error}"[:300], "--python INTERPRETER"),))
    except (ValueError, RecursionError):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        why = f"{python} answered with exit status {done.returncode}: {said[0] if said else 'nothing'}"
        return EngineInstall(python, unread=(Unread(what, why[:300], "--python INTERPRETER"),))
    if not isinstance(document, dict):
        return EngineInstall(python, unread=(Unread(what, f"{python} gave no answer that is one", "--python INTERPRETER"),))
    version, folder, torch = (document.get(name) for name in ("vllm", "folder", "torch"))
    unread: list[Unread] = []
    if not isinstance(folder, str):
        unread.append(Unread(what, f"{python} has no module vllm", "Name the interpreter that has vLLM: --python INTERPRETER"))
    release = None
    if isinstance(version, str):
        release, _ = guard_of_release(version)
    if release is None and isinstance(folder, str):
        unread.append(Unread("the server's release", f"its distribution says {version!r}: no release number"))
    return EngineInstall(
        python,
        version=version if isinstance(version, str) else None,
        release=release,
        folder=Path(folder) if isinstance(folder, str) else None,
        torch=torch if isinstance(torch, str) else None,
        unread=tuple(unread),
    )


def engine_kernel(
    install: EngineInstall, sm: int, top_k: int, vec: int, *, progress: Callable[[str, int, int | None], None] | None = None
) -> ChosenKernel | Unread:
    """The top-k that this installation would run on a card of architecture ``sm``, read from its shared objects."""
    what = "the server's kernel"
    if install.folder is None:
        return Unread(what, "no vLLM was found", "--python INTERPRETER")
    libraries = [*sorted(install.folder.glob("_C_stable_libtorch*.so")), *sorted(install.folder.glob("_C*.so"))]
    lost: list[str] = []
    for library in dict.fromkeys(libraries):
        try:
            chosen = choose_kernel(str(library), sm, top_k, vec, progress=progress)
        except (ReproError, OSError) as error:
            lost.append(f"{library.name}: {error}"[:300])
            continue
        if lost:
            chosen = dataclasses.replace(chosen, note=f"{chosen.note}; not read: {'; '.join(lost)}"[:1200])
        if install.release is None or chosen.image.guarded is not None:
            return chosen
        _, guarded = guard_of_release(install.release)
        return dataclasses.replace(
            chosen, release=install.release, guarded=guarded, guard_source=f"table of releases, vLLM {install.release}"
        )
    return Unread(what, "; ".join(lost)[:900] or f"{install.folder} holds no _C*.so")
