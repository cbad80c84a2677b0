"""Bisection: the right neighbours, skips, ends that are not what they are said to be; the probes; one step for git bisect run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from dsv4_repro.errors import KernelNotFoundError, UsageError
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign.bisect import (
    Answer,
    Bisection,
    Build,
    bisect_builds,
    builds_in_folder,
    builds_of_index,
    releases_between,
)
from dsv4_repro.repro.campaign.bisect_run import WORDS, hang_probe, runnable
from dsv4_repro.repro.campaign.cells import Cell, TrialResult
from dsv4_repro.repro.schemas import schema_of


def builds(count: int) -> list[Build]:
    return [Build(f"b{number}", f"b{number}") for number in range(count)]


@settings(deadline=None)
@given(st.integers(2, 200), st.data())
def test_the_neighbours_are_found_in_logarithmic_time_with_skips_between_them_named(count: int, data: Any) -> None:
    change = data.draw(st.integers(1, count - 1))
    skipped = data.draw(st.sets(st.integers(1, count - 2), max_size=5)) if count > 2 else set()
    asked: list[int] = []

    def probe(build: Build) -> tuple[Answer, dict[str, Any]]:
        number = int(build.label[1:])
        asked.append(number)
        return ("skip" if number in skipped else "good" if number < change else "bad"), {}

    found = bisect_builds(builds(count), probe, first="good")
    assert found.before is not None
    assert found.after is not None
    low, high = int(found.before.label[1:]), int(found.after.label[1:])
    assert low < change <= high
    assert {int(build.label[1:]) for build in found.between} == set(range(low + 1, high)) <= skipped
    assert len(asked) == len(set(asked)) <= count.bit_length() + 3 + 5 * len(skipped)


@pytest.mark.parametrize(("first", "answers"), [("good", "bb"), ("good", "gg"), ("bad", "gg"), ("good", "sb")])
def test_an_end_that_is_not_what_it_is_said_to_be_ends_the_search(first: Any, answers: str) -> None:
    words: dict[str, Answer] = {"g": "good", "b": "bad", "s": "skip"}
    found = bisect_builds(builds(2), lambda build: (words[answers[int(build.label[1:])]], {"why": "seen"}), first=first)
    assert found.before is None
    assert found.lines[0].startswith("No answer")
    assert "seen" in found.lines[0]


def test_releases_in_order_with_either_end_good() -> None:
    known = [Version(text) for text in ("0.27.1", "0.27.0", "0.28.0", "0.28.0rc1", "0.29.0")]
    found, older_first = releases_between("0.28.0", "vllm==0.27.0", published=lambda: known)
    assert [build.label for build in found] == ["vllm==0.27.0", "vllm==0.27.1", "vllm==0.28.0"]
    assert older_first is False
    with pytest.raises(KernelNotFoundError, match=r"0\.27\.5"):
        releases_between("0.27.5", "0.28.0", published=lambda: known)
    for one, other in (("x", "0.28.0"), ("0.28.0", "0.28.0")):
        with pytest.raises(UsageError):
            releases_between(one, other, published=lambda: known)


def test_a_folder_of_wheels_by_version_and_of_libraries_by_number(tmp_path: Path) -> None:
    for name in ("vllm-0.10.0-cp38-abi3-linux_x86_64.whl", "vllm-0.9.0-cp38-abi3-linux_x86_64.whl", "_C.10.so", "_C.9.so", "x.txt"):
        (tmp_path / name).touch()
    assert [build.label.split("-cp")[0] for build in builds_in_folder(tmp_path)] == [
        "vllm-0.9.0",
        "vllm-0.10.0",
        "_C.9.so",
        "_C.10.so",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="two or more"):
        builds_in_folder(tmp_path / "empty")
    with pytest.raises(UsageError):
        builds_in_folder(tmp_path / "none")


def test_an_index_of_nightly_wheels_by_commit(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    for version in ("0.28.0.dev3+gbbbbbbb", "0.28.0.dev20+gccccccc", "0.28.0.dev1+gaaaaaaa"):
        (folder / f"vllm-{version}-cp38-abi3-manylinux1_x86_64.whl").touch()
    names = "".join(f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>' for path in folder.iterdir())
    (folder / "index.html").write_text(names)
    found = builds_of_index(tmp_path.as_uri())
    assert [build.label.split("+")[1] for build in found] == ["gaaaaaaa", "gbbbbbbb", "gccccccc"]
    assert all(build.spec.startswith("file:") for build in found)


def test_a_wheel_by_its_address_is_run_as_its_kernels_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = builtin_image("unguarded", 120)
    asked: list[tuple[str, int]] = []

    class Kernels:
        def pick(self, sm: int, _top_k: int, _vec: int) -> Any:
            return image

    class Opened:
        kernels: Any = Kernels()
        absent = "none of it"

    def opened(spec: str, *, arch: int) -> Opened:
        asked.append((spec, arch))
        return Opened()

    monkeypatch.setattr("dsv4_repro.forensics.audit.targets.open_target", opened)
    url = "https://wheels.example/vllm-0.28.0.dev1%2Bgaaaaaaa-cp38-abi3-manylinux1_x86_64.whl"
    path = Path(runnable(url, 120, tmp_path))
    assert (path.suffix, path.read_bytes()) == (".cubin", image.cubin)
    answer, detail = hang_probe(Cell(name="", arch=120), None, 1)(Build("0.28.0.dev1+gaaaaaaa", url))
    assert (answer, asked) == ("bad", [(url, 120)] * 2), detail
    Opened.kernels = None
    answer, detail = hang_probe(Cell(name="", arch=120), None, 1)(Build("later", url))
    assert (answer, "none of it" in detail["why"]) == ("skip", True)
    assert runnable("file:///a/vllm%2Bx.whl", 120, tmp_path) == "/a/vllm+x.whl"
    assert runnable("vllm==0.27.1", 120, tmp_path) == "vllm==0.27.1"


class Script:
    def __init__(self, *results: TrialResult | Exception) -> None:
        self.results = list(results)

    def __call__(self, _cell: Cell, **_more: Any) -> Any:
        script = self

        class One:
            def trial(self, _seed: int) -> TrialResult:
                result = script.results.pop(0)
                if isinstance(result, Exception):
                    raise result
                return result

            def close(self) -> None: ...

        return One()


HANG = TrialResult("hang", 0, True, identity="a" * 12)


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (HANG, "bad"),
        (TrialResult("hang", 0, True, identity="b" * 12), "skip"),
        (TrialResult("hang", 0, True), "skip"),
        (TrialResult("wrong", 0, True, why="row 3"), "skip"),
        (TrialResult("no window", 0, why="nobody waits"), "skip"),
        (TrialResult("other", 0, why="CubinError"), "skip"),
        (KernelNotFoundError("no code for sm_120"), "skip"),
        (TrialResult("clean", 0, True), "good"),
    ],
)
def test_bad_is_the_same_hang_and_not_any_failure(result: Any, answer: str) -> None:
    probe = hang_probe(Cell(name=""), "a" * 12, 1, Script(result))
    found, detail = probe(Build("x", "x"))
    assert found == answer
    assert detail["why"]


def test_the_identity_is_that_of_the_bad_end_when_none_is_given() -> None:
    other = TrialResult("hang", 0, True, identity="b" * 12)
    probe = hang_probe(Cell(name=""), None, 1, Script(HANG, other, HANG))
    assert [probe(Build("x", "x"))[0] for _ in range(3)] == ["bad", "skip", "bad"]


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds of the kernel written here: the defect in 1 to 3, the guard from 4 on, 5 not readable."""
    folder = tmp_path_factory.mktemp("cubins")
    for number in (1, 2, 3, 4, 5, 6):
        image = builtin_image("unguarded" if number < 4 else "guard", 120)
        (folder / f"build-{number}.cubin").write_bytes(image.cubin if number != 5 else b"\x7fELF junk")
    return folder


def test_a_folder_of_builds_is_bisected_by_running_them_and_the_evidence_is_kept(
    cubins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        [
            "bisect",
            "--builds",
            str(cubins),
            "--bad",
            "build-1.cubin",
            "--good",
            "build-6.cubin",
            "--json",
            "--out",
            str(tmp_path / "b"),
        ]
    )
    document = json.loads(capsys.readouterr().out)
    assert (status, document["before"], document["after"], document["becomes"]) == (0, "build-3.cubin", "build-4.cubin", "good")
    jsonschema.validate(document, schema_of("bisect"))
    kept = sorted(path.name for path in (tmp_path / "b").glob("step-*.json"))
    assert len(kept) == len(document["steps"])
    first = json.loads((tmp_path / "b" / kept[0]).read_text())
    assert (first["answer"], len(first["identity"])) == ("bad", 12)


def test_git_bisect_run_finds_the_commit(cubins: Path, tmp_path: Path) -> None:
    """A real repository whose build is a file; the step is the verb, in a process of its own."""
    if shutil.which("git") is None:
        pytest.skip("no git")

    def git(*words: str) -> str:
        settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    commits = []
    for number in (6, 4, 3, 2, 1):  # from fixed to broken: the commit that brings the defect is the third
        (tmp_path / "_C.cubin").write_bytes((cubins / f"build-{number}.cubin").read_bytes())
        (tmp_path / "n").write_text(str(number))
        git("add", "-A")
        git("commit", "-qm", f"build {number}")
        commits.append(git("rev-parse", "HEAD").strip())
    git("bisect", "start", commits[-1], commits[0])
    step = [sys.executable, "-m", "dsv4_repro.repro", "bisect", "--git-run", "--kernel", "_C.cubin", "--trials", "1"]
    said = git("bisect", "run", *step)
    assert f"{commits[2]} is the first bad commit" in said


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--kernel", "builtin"], 1), (["--kernel", "builtin:guard"], 0), (["--kernel", "not-built.so"], 125),
        (["--kernel", "builtin", "--identity", "0" * 12], 125), ([], 128), (["--kernel", "builtin", "--on", "moon"], 128),
        (["--kernel", "builtin", "--identity", "zz"], 128),
    ],
)  # fmt: skip
def test_a_wrong_command_line_stops_git_bisect_and_is_not_a_bad_commit(words: list[str], status: int) -> None:
    assert main(["bisect", "--git-run", "--trials", "1", *words]) == status


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--good", "0.28.0"],
        ["--good", "a", "--bad", "b"],
        ["--good", "1", "--bad", "2", "--predicate", "x"],
        ["--builds", ".", "--index", "u"],
    ],
)
def test_wrong_flags_are_usage(words: list[str]) -> None:
    assert main(["bisect", *words]) == 2


@pytest.mark.release_wheel
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        (["--good", "0.29.0", "--bad", "0.26.0"], "vllm==0.27.1", "vllm==0.28.0"),
        (["--good", "0.19.1", "--bad", "0.20.2", "--predicate", "present"], "vllm==0.19.1", "vllm==0.20.0"),
        (["--good", "0.24.0", "--bad", "0.25.1", "--predicate", "audit", "--arch", "sm_120"], "vllm==0.24.0", "vllm==0.25.0"),
    ],
)
def test_the_published_boundaries(words: list[str], before: str, after: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["bisect", *words, "--json"])
    document = json.loads(capsys.readouterr().out)
    if document.get("error") == "DownloadError":
        pytest.skip(document["message"])
    assert (status, document["before"], document["after"]) == (0, before, after)


@pytest.mark.parametrize("words", [*WORDS.values(), None])
@pytest.mark.parametrize("becomes", ["bad", "good"])
def test_the_answer_is_a_sentence(words: dict[str, str] | None, becomes: Answer) -> None:
    before, after = Build("1", "vllm==1"), Build("2", "vllm==2")
    found = Bisection((before, after), before=before, after=after, becomes=becomes)
    if words is not None:
        found.words = words
    assert re.fullmatch(r"1 -> 2: 2 is the first( \w+)? build( (on|that|without) [a-z ]+)?\.", found.lines[0]), found.lines
