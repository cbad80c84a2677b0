"""Is the build that a server runs affected by vLLM #51593, as far as seconds allow: its Python by content, and its live flags.

The audit of the loaded machine code takes half a minute and is another verb. Here the Python files that decide are compared, byte
for byte, with those of the published releases, and the flags of the command line say whether decode batches are padded at all. What
was not looked at (the shared object itself) is said.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import PlanError
from ...forensics.device_state import Unread
from ...forensics.evidence.opening import at_once
from .audited_builds import Audited, recall_audit
from .permission import as_root, closed

if TYPE_CHECKING:
    from ...forensics.audit.recipe import Recipe
    from .records import ServerTarget

__all__ = ["LiveBuild", "live_build", "loaded_libraries", "read_arguments", "server_arguments"]

_LIBRARY = re.compile(r"(/\S.*/vllm)/_C[^/]*\.so(?: \(deleted\))?$")
_MAX_MAPS = 8 << 20
_MAX_FILE = 4 << 20
_SIGNATURE = "vllm-51593"


@dataclass(frozen=True, slots=True)
class LiveBuild:
    """``affected``: by what is written in ``text``; "not known" where one of the two questions has no answer.

    ``yes``: an audit of these loaded files with these flags said so. ``possible``: an affected release, and flags that pad; whether
    rows are of a width that wedges is for the audit to prove. ``releases``: whose deciding Python this is, byte for byte (empty: of
    none known). ``live_counts``: numbers of live requests whose decode batch is padded with these flags; None if not known.
    """

    affected: Literal["yes", "possible", "no", "not known"]
    text: str
    releases: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    live_counts: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()


def _bytes(path: Path, limit: int) -> bytes:
    with open(path, "rb", opener=at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(22, "not a regular file")
        parts, size = [], 0
        while size < limit and (piece := stream.read(min(limit - size, 1 << 20))):
            parts.append(piece)
            size += len(piece)
    return b"".join(parts)


def loaded_libraries(pid: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """vLLM's shared objects that a process has mapped, as it names them. OSError if its map cannot be read."""
    found: dict[str, None] = {}
    for line in _bytes(proc / str(pid) / "maps", _MAX_MAPS).decode("utf-8", "replace").splitlines():
        path = line.split(maxsplit=5)[-1] if line.count(" ") >= 5 else ""
        if _LIBRARY.match(path):
            found[path] = None
    return tuple(found)


def read_arguments(pid: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The command line of a process. OSError if it cannot be read."""
    raw = _bytes(proc / str(pid) / "cmdline", 1 << 20)
    return tuple(part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0") if part)


def server_arguments(target: ServerTarget, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The command line of a server's process that has the engine's flags; empty if none can be read."""
    for pid in (target.api_pid, *target.engine_pids, *(rank.pid for rank in target.ranks)):
        if pid is None:
            continue
        try:
            words = read_arguments(pid, proc)
        except OSError:
            continue
        if any(word.startswith("--") for word in words):
            return words
    return ()


@cache
def _affected_range() -> tuple[str, str]:
    from ...forensics.signature import catalogue

    signature = next(item for item in catalogue() if item.name == _SIGNATURE)
    return signature.affected, signature.fixed


def _python(pid: int, libraries: Sequence[str], proc: Path) -> tuple[Mapping[str, bytes], Unread | None]:
    from ...forensics.audit.known_builds import PYTHON_FILES

    match = _LIBRARY.match(libraries[0]) if libraries else None
    if match is None:
        return {}, Unread("loaded library", "no shared object of vLLM is in the process's map", "Name a worker: dsv4-repro why PID")
    package = match[1].lstrip("/")
    members: dict[str, bytes] = {}
    why = ""
    for name in PYTHON_FILES:
        relative = Path(package).parent / name
        for path in (proc / str(pid) / "root" / relative, Path("/") / relative):
            try:
                members[name] = _bytes(path, _MAX_FILE)
                break
            except OSError as error:
                why = f"{path}: {error.strerror or error}"
    return members, Unread("the build's Python", why) if not members else None


def _recipe(arguments: Sequence[str]) -> tuple[Recipe | None, tuple[str, ...], str]:
    """(the recipe that the flags make, notes, why there is none)."""
    from ...forensics.audit.recipe_text import recipe_from_arguments

    if not any(word.startswith("--") for word in arguments):
        return None, (), "no command line with flags was found"
    try:
        recipe, notes = recipe_from_arguments(arguments)
    except PlanError as error:
        return None, (), str(error)
    return (None, tuple(notes), recipe.not_modelled) if recipe.not_modelled else (recipe, tuple(notes), "")


def _padding(recipe: Recipe) -> tuple[int, ...]:
    """Live counts whose decode batch is padded in a FULL graph, with speculative tokens."""
    from ...forensics.audit.recipe import padded_shapes

    if not recipe.mtp:
        return ()
    return tuple(
        sorted({shape.live for shape in padded_shapes(recipe) if shape.padding and shape.graph_rows in recipe.graph_sizes})
    )


def _recalled(audited: Audited) -> tuple[Literal["yes", "possible", "no", "not known"], str]:
    words = {word for word, _ in audited.answers.values()}
    each = "; ".join(
        f"{arch} {word}{' at ' + ', '.join(map(str, counts[:12])) + ' live' if counts else ''}"
        for arch, (word, counts) in sorted(audited.answers.items())
    )
    text = f"audited {audited.when}, these loaded files and flags: {each}"
    if words == {"VULNERABLE"}:
        return "yes", text
    if "VULNERABLE" in words:
        return "possible", text
    return ("no" if words <= {"PROVED", "HOLDS", "NOT PRESENT"} else "not known"), text


def live_build(pid: int, arguments: Sequence[str], *, proc: Path = Path("/proc")) -> LiveBuild:
    """``pid``: a worker, or the process that has vLLM's libraries. Never raises for what cannot be read: that is in ``unread``."""
    from packaging.specifiers import SpecifierSet

    from ...forensics.audit.known_builds import releases_with_python

    unread: list[Unread] = []
    try:
        libraries = loaded_libraries(pid, proc)
    except OSError as error:
        libraries = ()
        unread.append(Unread(f"/proc/{pid}/maps", error.strerror or str(error), "Run as the server's user, or as root."))
    members: Mapping[str, bytes] = {}
    if libraries:
        members, why = _python(pid, libraries, proc)
        unread += [why] if why is not None else []
    elif not unread:
        unread.append(Unread("loaded library", "no shared object of vLLM is in the process's map"))
    releases = releases_with_python(members)
    recipe, notes, why_not = _recipe(arguments)
    if why_not:
        unread.append(Unread("the server's flags", why_not))
    counts = _padding(recipe) if recipe is not None else None
    here = [proc / str(pid) / "root" / path.lstrip("/") for path in libraries]
    audited = recall_audit(here, recipe) if recipe is not None and here else None
    if audited is not None:
        affected_word, text = _recalled(audited)
        return LiveBuild(affected_word, text, releases, libraries, counts, notes, tuple(unread))
    affected, fixed = _affected_range()
    inside = {SpecifierSet(affected).contains(version, prereleases=True) for version in releases}
    audit = f"dsv4-repro audit {pid}"
    if inside == {False}:
        return LiveBuild(
            "no", f"its Python is that of vLLM {' or '.join(releases)}, byte for byte, outside {affected} (fixed in {fixed})",
            releases, libraries, counts, notes, tuple(unread),
        )  # fmt: skip
    if counts == ():
        text = "with its flags no decode batch is padded in a FULL graph with speculative tokens"
        return LiveBuild("no", text, releases, libraries, counts, notes, tuple(unread))
    if inside == {True} and counts:
        few = ", ".join(map(str, counts[:12])) + (" …" if len(counts) > 12 else "")
        text = (
            f"its Python is that of vLLM {' or '.join(releases)}, byte for byte ({affected} is affected), and its flags pad the "
            f"decode batch at {few} live requests; the loaded machine code was not read: {audit}"
        )
        return LiveBuild("possible", text, releases, libraries, counts, notes, tuple(unread))
    whose = f"that of vLLM {' or '.join(releases)}" if releases else "of no release known here" if members else "not read"
    # The audit reads the same memory map.
    proof = (
        "its machine code cannot be read from here"
        if not libraries
        else f"the proof on the loaded code takes half a minute: {audit}"
    )
    if not libraries and closed(unread):
        proof = f"the proof on its machine code takes half a minute: {as_root(audit)}"
    return LiveBuild(
        "not known", f"its Python is {whose}; {proof}",
        releases, libraries, counts, notes, tuple(unread),
    )  # fmt: skip
