"""Keys on command lines, wherever a command line is shown or written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_repro.errors import UnavailableError
from dsv4_repro.forensics.collect.process_table import ProcessEntry
from dsv4_repro.repro.options import RunFlags, ServerFlags
from dsv4_repro.repro.server_run import _command
from dsv4_repro.repro.serving.engine_flags import parse_flags
from dsv4_repro.repro.serving.ranks import find_server
from dsv4_repro.repro.serving.shown_words import LEFT_OUT, shown_title, shown_words

SECRET = "plainpw42"


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", SECRET, "b" + SECRET, "--port", "1"],
        ["--api_key", SECRET],
        [f"--api-key={SECRET}"],
        ["--api-k", SECRET],
        ["--hf-token", SECRET],
        ["--hf_t", SECRET],
        ["--ssl-keyfile-password", SECRET],
        ["--kv-transfer-config", f'{{"extra": {{"access_token": "{SECRET}", "api_key": "{SECRET}"}}}}'],
        ["--kv-transfer-config", f"{{'password': '{SECRET}'}}"],
        ["env", f"HF_TOKEN={SECRET}", "vllm", "serve"],
        ["--url", f"http://user:{SECRET}@host:8000"],
        [f"vllm serve m --api-key {SECRET} --port 1"],
        ["--middleware.api_key", SECRET],
    ],
)
def test_a_secret_is_in_none_of_the_words(words: list[str]) -> None:
    shown = shown_words(words)
    assert SECRET not in " ".join(shown)
    assert LEFT_OUT in " ".join(shown)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-batched-tokens", "8192", "--tokenizer", "x", "--api-server-count", "2", "-tp", "2", "-O.level=3"],
        ["serve", "/models/key", "--served-model-name", "secret"],
        ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'],
        [],
    ],
)
def test_all_else_stays_as_it_is(words: list[str]) -> None:
    assert shown_words(words) == tuple(words)


def test_a_title_is_cut_after_the_secret_is_out_of_it() -> None:
    entry = ProcessEntry(7, 1, "vllm", "S", 1, ("vllm", "serve", "m", "--api-key", SECRET * 50, "--port", "1"))
    assert SECRET[:4] not in shown_title(entry, 60)
    assert len(shown_title(entry, 20)) == 20


def test_two_servers_are_listed_without_their_keys(tmp_path: Path) -> None:
    for pid in (1, 70, 80):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) {' '.join(['S', '0', *['0'] * 17, '77', *['0'] * 30])}\n")
        words = ["init"] if pid == 1 else ["vllm", "serve", "m", "--api-key", SECRET]
        (tmp_path / str(pid) / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")
    with pytest.raises(UnavailableError) as caught:
        find_server(root=tmp_path)
    assert SECRET not in str(caught.value)
    assert "80 (vllm serve m --api-key <left out>)" in str(caught.value)


def test_the_recorded_command_of_a_run_holds_no_secret() -> None:
    given = ServerFlags(url=f"http://user:{SECRET}@h:1", engine=["--api-k", SECRET])
    assert parse_flags(given.engine or ()).shown() == ("--api-k", LEFT_OUT)
    words = _command(None, RunFlags(), given, Path("plan.json"))  # type: ignore[arg-type]
    assert SECRET not in " ".join(words)
    assert words[-3:] == ("--", "--api-k", LEFT_OUT)
