"""Bisection over builds in an order: where does the same hang, the exposure, or the kernel itself begin or end?

The ends are tried first: an end that is not what it is said to be ends the search. A build that cannot be judged is skipped, and
the nearest one that can be is taken; where only skipped builds are left between good and bad, the answer is a range and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ...errors import KernelNotFoundError, UsageError

__all__ = ["Answer", "Bisection", "Build", "Probe", "bisect_builds", "builds_in_folder", "builds_of_index", "releases_between"]

Answer = Literal["good", "bad", "skip"]
_MOST_BUILDS = 100_000


@dataclass(frozen=True, slots=True)
class Build:
    """``label``: what a person calls it; ``spec``: what is opened: a release, a path, or an address."""

    label: str
    spec: str


class Probe(Protocol):
    """Judges one build; ``detail`` is the evidence that is kept."""

    def __call__(self, build: Build) -> tuple[Answer, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One build that was judged."""

    build: Build
    answer: Answer
    detail: dict[str, Any]


@dataclass(slots=True)
class Bisection:
    """``before`` and ``after`` are neighbours of different answers (or the nearest ones: then ``between`` were skipped).

    ``why_not``: why there is no answer.
    """

    builds: tuple[Build, ...]
    steps: list[Step] = field(default_factory=list)
    before: Build | None = None
    after: Build | None = None
    becomes: Answer | None = None
    between: tuple[Build, ...] = ()
    why_not: str = ""
    words: dict[str, str] = field(default_factory=lambda: {"bad": "first bad build", "good": "first good build"})

    @property
    def lines(self) -> list[str]:
        """The answer in sentences."""
        if self.before is None or self.after is None:
            return [f"No answer: {self.why_not}."]
        change = self.words["bad" if self.becomes == "bad" else "good"]
        if not self.between:
            return [f"{self.before.label} -> {self.after.label}: {self.after.label} is the {change}."]
        names = ", ".join(build.label for build in self.between[:8])
        return [
            f"{self.before.label} -> {self.after.label}: the {change} is one of {len(self.between) + 1} "
            f"({names} could not be judged)."
        ]


def bisect_builds(
    builds: Sequence[Build],
    probe: Probe,
    *,
    first: Answer,
    keep: Callable[[Step], None] = lambda _step: None,
) -> Bisection:
    """Find where the answer changes between the first of ``builds``, which is ``first`` ("good" or "bad"), and the last.

    At most the logarithm of their number in probes, plus the skipped ones.
    """
    if len(builds) < 2:
        raise UsageError("bisect needs two builds or more, good and bad")
    last: Answer = "bad" if first == "good" else "good"
    result = Bisection(tuple(builds))
    answers: dict[int, Answer] = {}

    def ask(place: int) -> Answer:
        if place not in answers:
            answer, detail = probe(builds[place])
            answers[place] = answer
            step = Step(builds[place], answer, detail)
            result.steps.append(step)
            keep(step)
        return answers[place]

    for place, said in ((0, first), (len(builds) - 1, last)):
        seen = ask(place)
        if seen != said:
            why = result.steps[-1].detail.get("why", "")
            result.why_not = f"{builds[place].label} was said to be {said} and is {seen}" + (f" ({why})" if why else "")
            return result
    low, high = 0, len(builds) - 1
    while high - low > 1:
        middle = (low + high) // 2
        order = sorted(range(low + 1, high), key=lambda place, at=middle: (abs(place - at), place))  # type: ignore[misc]
        judged = next((place for place in order if ask(place) != "skip"), None)
        if judged is None:
            break
        if answers[judged] == first:
            low = judged
        else:
            high = judged
    result.before, result.after, result.becomes = builds[low], builds[high], last
    result.between = tuple(builds[low + 1 : high])
    return result


# -- what is bisected ----------------------------------------------------------------------------------------------------------


def releases_between(one: str, other: str, *, published: Callable[[], Sequence[Version]] | None = None) -> tuple[list[Build], bool]:
    """(releases from one to the other in order, whether ``one`` is the older). UsageError for what is no release number."""
    ends = []
    for text in (one, other):
        try:
            ends.append(Version(text.removeprefix("vllm==").strip()[:64]))
        except InvalidVersion:
            raise UsageError(
                f"{text[:80]!r} is no release number", help_text="--good 0.28.0 --bad 0.27.1, or --builds DIR with file names"
            ) from None
    low, high = min(ends), max(ends)
    if low == high:
        raise UsageError(f"good and bad are both {one}")
    known = sorted({version for version in (published or _published)() if not version.is_prerelease and low <= version <= high})
    for end in ends:
        if end not in known:
            near = ", ".join(map(str, known[:6])) or "none in that range"
            raise KernelNotFoundError(f"vLLM {end} is not on the configured index; between the two it has {near}")
    return [Build(f"vllm=={version}", f"vllm=={version}") for version in known], ends[0] == low


def _published() -> Sequence[Version]:
    from ...kernels.package_index import list_wheels, pip_settings

    return [candidate.version for candidate in list_wheels("vllm", pip_settings()) if not candidate.yanked]


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name))


def builds_in_folder(folder: Path) -> list[Build]:
    """Wheels of a folder by version, or its .so and .cubin files by name with numbers as numbers. UsageError if there are not
    two.
    """
    try:
        files = [path for path in folder.iterdir() if path.suffix in (".whl", ".so", ".cubin") and path.is_file()]
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from None
    if len(files) > _MOST_BUILDS:
        raise UsageError(f"{folder}: more than {_MOST_BUILDS} builds")
    wheels, others = [], []
    for path in files:
        if path.suffix != ".whl":
            others.append(path)
            continue
        try:
            wheels.append((parse_wheel_filename(path.name)[1], path))
        except InvalidWheelFilename:
            others.append(path)
    ordered = [path for _version, path in sorted(wheels, key=lambda item: (item[0], item[1].name))]
    ordered += sorted(others, key=lambda path: _natural(path.name))
    if len(ordered) < 2:
        raise UsageError(f"{folder}: {len(ordered)} wheels, .so and .cubin files; two or more are needed")
    return [Build(path.name, str(path)) for path in ordered]


def builds_of_index(url: str) -> list[Build]:
    """The vLLM wheels of an index (nightly wheels carry their commit in the local version), by version; x86-64 before aarch64."""
    from ...kernels.package_index import IndexSettings, list_wheels
    from ...kernels.releases import host_machine

    found: dict[Version, Build] = {}
    for candidate in list_wheels("vllm", IndexSettings(indexes=(url.rstrip("/"),))):
        fits = any(host_machine() in platform for platform in candidate.platforms)
        if fits or candidate.version not in found:
            found[candidate.version] = Build(str(candidate.version), candidate.url)
    if len(found) < 2:
        raise UsageError(f"the index has {len(found)} wheels of vLLM; two or more are needed")
    return [found[version] for version in sorted(found)]
