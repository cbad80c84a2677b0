"""Is a live build affected: from a process as /proc shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_repro.forensics.audit import known_builds
from dsv4_repro.forensics.audit.recipe_text import recipe_from_arguments
from dsv4_repro.forensics.audit.verdicts import BuildAudit, BuildIdentity, RecipeAnswer
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.repro.serving.audited_builds import recall_audit, remember_audit
from dsv4_repro.repro.serving.live_build import live_build, loaded_libraries, read_arguments, server_arguments
from dsv4_repro.repro.serving.records import Rank, ServerTarget

SERVE = (
    "vllm", "serve", "m", "--max-model-len", "16384", "--max-num-seqs", "16", "--speculative-config",
    '{"method":"mtp","num_speculative_tokens":1}',
)  # fmt: skip
PID = 4711


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc with one worker, in whose own root lies a vLLM."""
    monkeypatch.setenv("DSV4_REPRO_CACHE", str(tmp_path / "cache"))
    process = tmp_path / "proc" / str(PID)
    package = process / "root" / "opt" / "site-packages" / "vllm"
    (package / "v1/attention/backends/mla").mkdir(parents=True)
    (package / "_version.py").write_text("version = '0.0'\n")
    (package / "v1/attention/backends/mla/indexer.py").write_text("x = 1\n")
    (process / "maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 1   /usr/lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 2   /opt/site-packages/vllm/_C_stable_libtorch.abi3.so\n"
        "7f03-7f04 r--p 00000000 08:01 2   /opt/site-packages/vllm/_C_stable_libtorch.abi3.so\n"
        "7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    (process / "cmdline").write_bytes("\0".join(SERVE).encode() + b"\0")
    return tmp_path / "proc"


def _releases(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[dict[str, bytes]]:
    asked: list[dict[str, bytes]] = []

    def find(members: dict[str, bytes]) -> tuple[str, ...]:
        asked.append(dict(members))
        return names if members else ()

    monkeypatch.setattr(known_builds, "releases_with_python", find)
    return asked


def test_the_process_is_read_through_its_own_root(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded_libraries(PID, proc) == ("/opt/site-packages/vllm/_C_stable_libtorch.abi3.so",)
    assert read_arguments(PID, proc) == SERVE
    asked = _releases(monkeypatch, "0.23.0")
    found = live_build(PID, SERVE, proc=proc)
    assert asked == [{"vllm/_version.py": b"version = '0.0'\n", "vllm/v1/attention/backends/mla/indexer.py": b"x = 1\n"}]
    assert (found.affected, found.releases) == ("possible", ("0.23.0",))
    assert found.live_counts is not None
    assert 3 in found.live_counts
    assert 4 not in found.live_counts
    assert f"dsv4-repro audit {PID}" in found.text


def test_a_fixed_release_is_not_affected_whatever_its_flags(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _releases(monkeypatch, "0.28.0", "0.29.0")
    found = live_build(PID, (), proc=proc)
    assert found.affected == "no"
    assert "0.28.0 or 0.29.0" in found.text


@pytest.mark.parametrize(
    "more", [("--enforce-eager",), ("--compilation-config", '{"cudagraph_mode":"PIECEWISE"}'), ("--speculative-config", "{}")]
)
def test_flags_under_which_nothing_is_padded(proc: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    _releases(monkeypatch, "0.23.0")
    plain = SERVE[:7] if more[0] == "--speculative-config" else SERVE
    words = plain if more[0] == "--speculative-config" else (*plain, *more)
    assert live_build(PID, words, proc=proc).affected == "no"


def test_what_cannot_be_known_is_not_known(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _releases(monkeypatch)
    assert live_build(PID, SERVE, proc=proc).affected == "not known"
    _releases(monkeypatch, "0.23.0")
    found = live_build(PID, ("VLLM::Worker",), proc=proc)
    assert found.affected == "not known"
    assert any("flags" in item.what for item in found.unread)
    found = live_build(1, SERVE, proc=proc)
    assert found.affected == "not known"
    assert any(item.what == "/proc/1/maps" for item in found.unread)
    _releases(monkeypatch, "0.27.1", "0.28.0")
    assert live_build(PID, SERVE, proc=proc).affected == "not known"
    broken = live_build(PID, (*SERVE[:4], "-5"), proc=proc)
    assert broken.live_counts is None


@pytest.mark.parametrize("place", ["api", "engine", "rank"])
def test_the_flags_are_those_of_the_first_process_that_shows_any(place: str, tmp_path: Path) -> None:
    """An ended process, one whose title was written over its arguments, and one without flags are passed over."""
    for pid, words in ((1, None), (2, ("VLLM::EngineCore",)), (3, ("python", "serve.py")), (4, SERVE), (5, ("late", "--other"))):
        (tmp_path / str(pid)).mkdir()
        if words is not None:
            (tmp_path / str(pid) / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    target = {
        "api": ServerTarget(None, api_pid=4, engine_pids=(5,)),
        "engine": ServerTarget(None, engine_pids=(1, 2, 4), ranks=(Rank(5, 0, 1),)),
        "rank": ServerTarget(None, api_pid=1, engine_pids=(2,), ranks=(Rank(3, 0, 1), Rank(4, 1, 1), Rank(5, 2, 1))),
    }[place]
    assert server_arguments(target, tmp_path) == SERVE
    assert server_arguments(ServerTarget(None, api_pid=1, engine_pids=(2, 3, 99)), tmp_path) == ()
    assert server_arguments(ServerTarget(None), tmp_path) == ()


def test_a_deleted_library_and_a_process_without_one(proc: Path) -> None:
    maps = proc / str(PID) / "maps"
    maps.write_text("7f02-7f03 r-xp 00000000 08:01 2   /opt/site-packages/vllm/_C.abi3.so (deleted)\n")
    assert loaded_libraries(PID, proc) == ("/opt/site-packages/vllm/_C.abi3.so (deleted)",)
    maps.write_text("")
    found = live_build(PID, SERVE, proc=proc)
    assert found.affected == "not known"
    assert any(item.what == "loaded library" for item in found.unread)
    assert "dsv4-repro audit" not in found.text, "it would read the same map"


def test_another_users_process_is_audited_as_root(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> tuple[str, ...]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dsv4_repro.repro.serving.live_build.loaded_libraries", refused)
    assert f'sudo "$(command -v dsv4-repro)" audit {PID}' in live_build(PID, SERVE, proc=proc).text


def test_an_audit_of_the_same_files_and_flags_is_remembered(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _releases(monkeypatch, "0.23.0")
    library = proc / str(PID) / "root/opt/site-packages/vllm/_C_stable_libtorch.abi3.so"
    library.write_bytes(b"\x7fELF one")
    recipe, _ = recipe_from_arguments(SERVE)

    def audit(**words: str) -> BuildAudit:
        answers = tuple(
            RecipeAnswer.model_validate({"arch": arch, "word": word, "wedges_at": (3, 5) if word == "VULNERABLE" else ()})
            for arch, word in words.items()
        )
        return BuildAudit(target="x", build=BuildIdentity(name="x", known=True, how=""), recipe=answers)

    assert live_build(PID, SERVE, proc=proc).affected == "possible"
    assert not remember_audit([library], recipe, audit(), "now")
    assert remember_audit([library], recipe, audit(sm_90="VULNERABLE"), "2026-11-29T12:00:00Z")
    found = live_build(PID, SERVE, proc=proc)
    assert found.affected == "yes"
    assert "audited 2026-11-29T12:00:00Z" in found.text
    assert "sm_90 VULNERABLE at 3, 5 live" in found.text
    # Other flags, and another file under the same name, are other questions.
    assert live_build(PID, (*SERVE, "--max-num-seqs", "8"), proc=proc).affected == "possible"
    library.write_bytes(b"\x7fELF another")
    assert live_build(PID, SERVE, proc=proc).affected == "possible"
    for words, affected in (
        ({"sm_90": "PROVED", "sm_120": "NOT PRESENT"}, "no"),
        ({"sm_90": "PROVED", "sm_120": "VULNERABLE"}, "possible"),
        ({"sm_90": "CANNOT TELL"}, "not known"),
    ):
        remember_audit([library], recipe, audit(**words), "now")
        assert live_build(PID, SERVE, proc=proc).affected == affected


def test_a_damaged_memory_is_none(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, _ = recipe_from_arguments(SERVE)
    for payload in (b"", b"[]", b"{}", b'{"when": 1, "answers": {}}', b'{"when": 1, "answers": {"sm_90": ["FINE", []]}}'):
        monkeypatch.setattr(Cache, "load", lambda _self, _key, payload=payload: payload)
        assert recall_audit([proc / str(PID) / "maps"], recipe) is None
    assert recall_audit([proc / "gone"], recipe) is None
    assert recall_audit([], recipe) is None
