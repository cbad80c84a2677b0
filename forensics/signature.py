"""Known hang signatures: published cases as data (``signatures/*.toml``), and how a case compares with each.

A match says which of a signature's conditions were seen and which could not be read. "The same class, not this bug" is an answer: a
condition was read and does not hold, or the version is outside the affected range. Versions are recorded and compared for the
reader's sake; a build that is no known release is judged by what was seen.

A signature file: ``name`` (project-number), ``title``, ``class``, ``cause``, ``upstream`` (numbers), ``workaround``, ``fix``,
optional ``package``/``affected``/``fixed`` (a PEP 440 range), ``similar_only`` (listed for comparison, never named as the
verdict's), and conditions: ``[[must]]`` and ``[[must_not]]``, each with ``say`` and one test; ``optional = true``: may stay unread.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..errors import OurFaultError
from .evidence.agent_facts import recorded_step
from .evidence.facts import DeviceKernel
from .evidence.scheduler_dump import PaddingForecast
from .records import CLASSES
from .rules.view import View

__all__ = ["Condition", "Match", "Signature", "catalogue", "load_signature", "match_signatures", "version_standing"]

_TESTS = ("kernel", "frame", "log", "xid", "counter", "spinner", "residents", "padded", "max_seq_len_at_most", "gpu", "library",
    "wait", "setting",
          "late_rank", "process")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """``test``: which test, ``value``: its argument. ``optional``: does not stand in the way when it could not be read."""

    say: str
    test: str
    value: Any
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """One published case."""

    name: str
    title: str
    class_: str
    cause: str | None
    upstream: tuple[str, ...]
    must: tuple[Condition, ...]
    must_not: tuple[Condition, ...]
    package: str = ""
    affected: str = ""
    fixed: str = ""
    workaround: str = ""
    fix: str = ""
    similar_only: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """``standing``: match (all that is needed was seen), possible (nothing speaks against it, not all could be read), similar
    (the same class, listed for comparison), not this bug. Lists hold the conditions' sentences."""

    signature: Signature
    standing: Literal["match", "possible", "similar", "not this bug"]
    seen: tuple[str, ...]
    not_read: tuple[str, ...]
    against: tuple[str, ...]

    def sentence(self) -> str:
        name = self.signature.name
        if self.standing == "match":
            rest = f" Not read: {'; '.join(self.not_read)}." if self.not_read else ""
            return f"{name}: {'; '.join(self.seen)}.{rest}"
        if self.standing == "not this bug":
            return f"the same class as {name}, but not this bug: {'; '.join(self.against)}."
        seen, missing = "; ".join(self.seen) or "only the class", "; ".join(self.not_read) or "nothing"
        return f"{name} is {self.standing}: seen {seen}; not read {missing}."


def load_signature(text: str, origin: str) -> Signature:
    """Parse one signature file; OurFaultError names file and field (the catalogue ships with the program)."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OurFaultError(f"signature {origin}: {error}") from error
    class_, cause = data.get("class"), data.get("cause")
    if class_ not in CLASSES or (cause is not None and cause not in CLASSES[class_][0]):
        raise OurFaultError(f"signature {origin}: no such class or cause: {class_}/{cause}")
    for key in ("name", "title", "upstream"):
        if not data.get(key):
            raise OurFaultError(f"signature {origin}: {key} is missing")
    for key in ("affected", "fixed"):
        try:
            if data.get(key):
                SpecifierSet(data[key]) if key == "affected" else Version(data[key])
        except (InvalidSpecifier, InvalidVersion) as error:
            raise OurFaultError(f"signature {origin}: {key}: {error}") from error
    return Signature(
        data["name"], data["title"], class_, cause, tuple(data["upstream"]), _conditions(data.get("must", []), origin),
        _conditions(data.get("must_not", []), origin), data.get("package", ""), data.get("affected", ""), data.get("fixed", ""),
        data.get("workaround", ""), data.get("fix", ""), bool(data.get("similar_only", False)), data.get("note", ""),
    )  # fmt: skip


def _conditions(items: list[dict[str, Any]], origin: str) -> tuple[Condition, ...]:
    result = []
    for item in items:
        tests = [key for key in item if key in _TESTS]
        if len(tests) != 1 or not item.get("say"):
            raise OurFaultError(f"signature {origin}: a condition needs 'say' and exactly one test of {', '.join(_TESTS)}: {item}")
        value = item[tests[0]]
        if isinstance(value, str) and tests[0] in ("kernel", "frame", "log", "gpu", "process", "library"):
            try:
                re.compile(value if tests[0] != "library" else "x")
            except re.error as error:
                raise OurFaultError(f"signature {origin}: {value!r}: {error}") from error
        result.append(Condition(item["say"], tests[0], value, bool(item.get("optional", False))))
    return tuple(result)


@functools.cache
def catalogue() -> tuple[Signature, ...]:
    """All signatures that ship, by name."""
    folder = resources.files(__package__) / "signatures"
    found = [load_signature(entry.read_text("utf-8"), entry.name) for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(found, key=lambda signature: signature.name))


Answer = Literal["seen", "absent", "unread"]


def match_signatures(view: View, class_: str, cause: str | None, forecast: PaddingForecast | None) -> tuple[Match, ...]:
    """Signatures of the class (or of a child of it), best first: those of which something was seen, or that can be told apart."""
    matches = []
    for signature in catalogue():
        if signature.class_ != class_ and CLASSES[signature.class_][2] != class_:
            continue
        child = signature.class_ != class_
        matches.append(_compare(signature, view, cause, forecast, child=child))
    rank = {"match": 0, "possible": 1, "similar": 2, "not this bug": 3}
    kept = [m for m in matches if m.standing in ("match", "similar") or m.seen or (m.standing == "not this bug" and not m.not_read)]
    return tuple(sorted(kept, key=lambda m: (rank[m.standing], len(m.against), -len(m.seen), m.signature.name)))


def _compare(signature: Signature, view: View, cause: str | None, forecast: PaddingForecast | None, *, child: bool) -> Match:
    seen: list[str] = []
    unread: list[str] = []
    against: list[str] = []
    blocking = False
    if signature.cause is not None:
        if cause == signature.cause:
            seen.append(f"the cause is {cause}")
        elif cause is None:
            unread.append(f"the cause ({signature.cause})")
            blocking = True
        else:
            against.append(f"the cause is {cause}, not {signature.cause}")
    for condition in signature.must:
        answer = _test(condition, view, forecast)
        if answer == "seen":
            seen.append(condition.say)
        elif answer == "unread":
            unread.append(condition.say)
            blocking = blocking or not condition.optional
        else:
            against.append(f"not so: {condition.say}")
    against.extend(condition.say for condition in signature.must_not if _test(condition, view, forecast) == "seen")
    standing_version, sentence = version_standing(signature, view)
    if standing_version == "outside":
        against.append(sentence)
    elif standing_version == "inside":
        seen.append(sentence)
    elif signature.affected:
        unread.append(sentence)
    standing: Literal["match", "possible", "similar", "not this bug"]
    if against:
        standing = "not this bug"
    elif signature.similar_only:
        standing = "similar"
    elif blocking or child:
        standing = "possible"
    else:
        standing = "match"
    return Match(signature, standing, tuple(seen), tuple(unread), tuple(against))


def version_standing(signature: Signature, view: View) -> tuple[Literal["inside", "outside", "unknown"], str]:
    """Is the version that the evidence states affected? Of development and local builds the number does not tell: unknown."""
    if not signature.affected:
        return "unknown", ""
    stated = list(dict.fromkeys(f.version for f in view.case.versions if f.package == signature.package))
    if not stated:
        return "unknown", f"the version of {signature.package}"
    try:
        version = Version(stated[-1])
    except InvalidVersion:
        return "unknown", f"whether {signature.package} {stated[-1]} is affected"
    if version.is_devrelease or version.local or version.is_prerelease:
        return "unknown", f"whether {signature.package} {stated[-1]}, which is no release, is affected"
    if version in SpecifierSet(signature.affected):
        return "inside", f"{signature.package} {version} is affected ({signature.affected})"
    return "outside", f"{signature.package} {version} is not affected ({signature.affected})"


# ---------------------------------------------------------------------------------------------------------------------------------
# The tests


def _kernels(view: View) -> list[DeviceKernel]:
    return [k for d in view.devices for k in d.kernels or () if (k.blocks is None or k.blocks) and k.family != "nccl"]


def _test(condition: Condition, view: View, forecast: PaddingForecast | None) -> Answer:
    test, value = condition.test, condition.value
    if test == "kernel":
        names = [k.name for d in view.devices for k in d.kernels or () if k.name]
        # The agent reads row states of one op alone; a state that stands is a launch of it that is held.
        names = names or ["persistent_topk_kernel" for one in view.agents if one.wait is not None]
        if not names:
            return "unread"
        return "seen" if any(re.search(value, name) for name in names) else "absent"
    if test == "frame":
        frames = [f for t in view.case.threads for f in t.frames]
        if not frames:
            return "unread"
        return "seen" if any(re.search(value, f"{f.function} {f.file}") for f in frames) else "absent"
    if test == "log":
        texts = (
            [e.ref.text for e in view.case.events]
            + [e.ref.text for e in view.case.kernel]
            + [d.exception for d in view.case.devices if d.exception]
        )
        if not texts:
            return "unread"
        return "seen" if any(re.search(value, text) for text in texts) else "unread"
    if test == "process":
        names = [e.name for e in view.case.kernel if e.name] + [s.name for s in view.case.procs if s.name]
        if not names:
            return "unread"
        return "seen" if any(re.search(value, name, re.IGNORECASE) for name in names) else "unread"
    if test == "xid":
        if not view.case.kernel_log_seen and not view.case.kernel:
            return "unread"
        return "seen" if any(e.kind == "xid" and e.number in value for e in view.case.kernel) else "absent"
    if test in ("counter", "spinner", "residents", "wait"):
        return _device_test(test, value, view)
    if test == "padded":
        recorded = [
            step for one in view.agents if one.wait is not None and one.step is not None and (step := recorded_step(one.step))
        ]
        slots = [step.padded_requests for step in recorded if step.padded_requests is not None]
        if slots:
            return "seen" if any(number > 0 for number in slots) == bool(value) else "absent"
        if forecast is None:
            return "unread"
        return "seen" if (forecast.padded_requests > 0) == bool(value) else "absent"
    if test == "max_seq_len_at_most":
        found = _max_seq_lens(view)
        if not found:
            return "unread"
        return "seen" if min(found) <= value else "absent"
    if test == "gpu":
        names = [f.version for f in view.case.versions if f.package == "gpu"]
        names += [f"{name} sm_{sm}" for d in view.case.devices if d.state is not None for name, sm, _ in d.state.devices.values()]
        if not names:
            return "unread"
        return "seen" if any(re.search(value, name) for name in names) else "absent"
    if test == "library":
        package, _, spec = str(value).partition(" ")
        stated = [f.version for f in view.case.versions if f.package == package]
        try:
            return "unread" if not stated else "seen" if Version(stated[-1].split("+")[0]) in SpecifierSet(spec) else "absent"
        except (InvalidVersion, InvalidSpecifier):
            return "unread"
    if test == "setting":
        name, _, wanted = str(value).partition("=")
        stated = [f.version for f in view.case.versions if f.package == name]
        return "unread" if not stated else "seen" if stated[-1] == wanted else "absent"
    if test == "late_rank":
        from .rules.lateness import late_ranks

        return "seen" if late_ranks(view) else "unread"
    return "unread"


def _device_test(test: str, value: Any, view: View) -> Answer:
    kernels = _kernels(view)
    waits = [w for d in view.devices if d.diagnosis is not None for w in d.diagnosis.waits]
    if test == "residents":
        counts = [len(k.blocks) for k in kernels if k.blocks is not None]
        if not counts:
            return "unread"
        few = max(counts)
        return "seen" if (few == 1 if value == "one" else few <= 8 if value == "few" else few > 8) else "absent"
    if test == "wait":
        meanings = {b.meaning for k in kernels for b in k.blocks or ()} - {"unknown"}
        if not meanings:
            return "unread"
        return "seen" if value in meanings else "absent"
    values = [w.value for w in waits if w.value is not None] or [p.value for k in kernels for p in k.polls if p.value is not None]
    values = values or [1 for one in view.agents if one.wait is not None]
    if test == "counter":
        if not values:
            return "unread"
        return "seen" if any(number == value for number in values) else "absent"
    roles = {w.role for w in waits if w.role is not None}
    for kernel in kernels:
        group = kernel.group_size or next(
            (p.target for p in kernel.polls if p.target is not None and p.value == len(kernel.blocks or ())), None
        )
        if group and kernel.blocks:
            roles |= {"leader" if block.index[0] % group == 0 else "peer" for block in kernel.blocks}
    if not roles:
        return "unread"
    return "seen" if value in roles else "absent"


def _max_seq_lens(view: View) -> list[int]:
    """The host scalar of the resident launch, where the kernel's parameters were read."""
    found: list[int] = []
    for facts in view.devices:
        if facts.state is None:
            continue
        found.extend(
            int.from_bytes(grid.params[52:56], "little")
            for grid in facts.state.grids
            if grid.params is not None and len(grid.params) == 56 and "persistent_topk" in grid.kernel
        )
    return found or [one.wait.launch.max_seq_len for one in view.agents if one.wait is not None]
