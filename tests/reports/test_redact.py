"""Private values go, what the verdict is made of stays, and the same value has the same pseudonym."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.autopsy import autopsy_case
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.reports.redact import KeepError, Redactor, parse_keep
from dsv4_repro.reports.redact_json import redact_json
from dsv4_repro.reports.redact_rules import KINDS, is_secret_key

SALT = b"a salt of more than sixteen bytes"
CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.txt"))


def clean(text: str, **more: Any) -> str:
    redactor = Redactor(SALT, **more)
    redactor.learn(text)
    return redactor.text(text, "x.log")


GONE = [
    # tokens by form
    ("token hf_QmFzZTY0VG9rZW5BQkNE here", "hf_QmFzZTY0VG9rZW5BQkNE"),
    ("\x1b[31mhf_QmFzZTY0VG9rZW5BQkNE\x1b[0m", "hf_QmFz"),
    ("hf_QmFzZTY0\x1b[0mVG9rZW5BQkNE", "VG9rZW5BQkNE"),
    ("sk-proj-abcdefghijklmnop1234", "abcdefghijklmnop"),
    ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_"),
    ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln", "eyJhbGci"),
    ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
    ("authorization: basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1r"),
    ("-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIEcut", "MIIEcut"),
    # arguments, environments, settings, URLs
    ("vllm serve m --api-key s3cr3t --port 1", "s3cr3t"),
    ("vllm serve m --api-key one1 two2 three3 --port 1", "three3"),
    ("vllm serve m --hf-token=mytoken9", "mytoken9"),
    ("argv: ['--api-key', 'quoted-key', 'x']", "quoted-key"),
    ("cmd\0--api-key\0nul-key\0--x", "nul-key"),
    ("VLLM_API_KEY=abcdef1 WANDB_API_KEY='q w'", "abcdef1"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
    ("{'api_key': ['alpha-1', 'beta-2'], 'n': 1}", "beta-2"),
    ('{"hf_token": "plain-token"}', "plain-token"),
    ("password: correct-horse", "correct-horse"),
    ("postgres://bob77:pa55word@db:5432/x", "pa55word"),
    ("https://x.test/a?token=abcdef&b=1", "abcdef"),
    ("https://s3.test/k?X-Amz-Signature=deadbeef01&X=1", "deadbeef01"),
    ("https://hooks.slack.com/services/T01/B02/abcDEF123", "abcDEF123"),
    # prompts and completions
    ("Received request a: prompt: 'tell me a secret', params: S()", "tell me"),
    ('Received request a: prompt: "it\'s mine", params: S()', "mine"),
    ("Received request a: prompt: 'cut off by the line", "cut off"),
    ("Received request a: prompt: 'quote \\' inside it', x", "inside it"),
    ("prompt_token_ids: [9707, 11, 847]", "9707"),
    ("Generated response a: output: 'the answer', output_token_ids: [52]", "the answer"),
    ('{"messages": [{"role": "user", "content": "my illness"}]}', "my illness"),
    ('{"prompt": ["first text", "second text"], "n": 2}', "second text"),
    ("outputs=[CompletionOutput(index=0, text='said aloud', token_ids=[7])]", "said aloud"),
    ("NewRequestData(req_id=a,prompt_token_ids=[1234, 5678],mm=[])", "5678"),
    ("scheduled_spec_decode_tokens={'a': [4321]}", "4321"),
    # people and machines
    ("/home/alice/x /home/alice", "alice"),
    ("/Users/carol/Library", "carol"),
    ("C:\\Users\\dave\\x", "dave"),
    ("USER=erin made it; erin left", "erin"),
    ("mail frank.miller@some-firm.example.net", "frank.miller"),
    ("mail frank.miller@some-firm.example.net", "some-firm"),
    ("grace@box-12:~/x$ ls", "grace"),
    ("HOSTNAME=gpu-07", "gpu-07"),
    ("gpu-07:41:42 [0] NCCL INFO x", "gpu-07"),
    ("Nov 29 14:05:01 gpu-07 vllm[41]: hi", "gpu-07"),
    ("process 7 on node gpu-07\nand gpu-07 again, GPU-07 too", "gpu-07"),
    ("Linux gpu-07 5.15.0-136-generic #1", "gpu-07"),
    ('up{instance="gpu-07:9400"} 1', "gpu-07"),
    ("tcp://gpu-07.rack3.corp:29500", "rack3"),
    ("db.prod.internal refused", "prod"),
    ("x ip-10-1-2-3 y", "ip-10-1-2-3"),
    ("eth0:10.1.2.3<0> via 192.168.7.9", "192.168.7.9"),
    ('1.2.3.4:51874 - "GET /health"', "1.2.3.4"),
    ("inet6 fe80::3eec:efff:fe12:3456/64", "3eec"),
    ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "8a2e"),
    ("link/ether 3c:ec:ef:12:34:56 brd ff:ff:ff:ff:ff:ff", "3c:ec:ef"),
    ("3C-EC-EF-12-34-56", "3C-EC"),
    ("Serial Number : 1650924000123", "1650924000123"),
]


@pytest.mark.parametrize(("text", "private"), GONE, ids=[str(index) for index in range(len(GONE))])
def test_private_values_go(text: str, private: str) -> None:
    done = clean(text)
    assert private.lower() not in done.lower()
    assert done.count("\n") == text.count("\n")


STAYS = [
    "_ZN4vllm10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_20PersistentTopKParamsE at +0x1ce0 polls 0x7f2c5a005468",
    "c10::cuda::CUDAStream a::b dead::beef f::add std::vector<c10::Half> cafe::babe",
    "+0x1cd0 LDG.E.STRONG.GPU R4, desc[UR16][R4.64+0xc08]",
    "12:34:56 2026-11-29T14:05:01.123Z 00:11:22 1-02:03:04 14:05:01,123",
    "GPU 00000000:17:00.0 0000:17:00.0 Off | 98%  72C",
    "nvidia-cudnn-cu12        9.1.0.70",
    "cudnn 9.10.2.21, TensorRT 10.13.3.9, cuda==12.8.1.2, libfoo.so.1.2.3.4, driver version: 10.2.86.1",
    "NCCL version 2.27.5.1+cuda13.0",
    "flashinfer-0.6.1.2-cp39 pkg_v1.2.3.4 cuda-toolkit 12.4.1.0",
    "127.0.0.1:8000 0.0.0.0 ::1 255.255.255.255 localhost ff:ff:ff:ff:ff:ff",
    "threading.local torch.cuda.local self.home a.internal_state()",
    "memcpy@GLIBC_2.14 cuLaunchKernel@@libcuda.so.1 pkg@1.2 file.nvcudmp@byte 0x40-0x80 @torch.compile",
    "num_tokens=12 max_tokens: 4096 pad_token='<pad>' eos_token_id=2 prompt_tokens: 17 tokens per second, tokenizer='x'",
    "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 12.5 tokens/s, Running: 3 reqs",
    "num_scheduled_tokens={'cmpl-1': 2, 'cmpl-2': 2}, total_num_scheduled_tokens=4, scheduled_spec_decode_tokens={'a': [-1, -1]}",
    "No available shared memory broadcast block found in 60 seconds.",
    "https://github.com/vllm-project/vllm/issues/51593 https://huggingface.co/x git@github.com:o/r",
    "/root/.cache/vllm /home/ubuntu/x USER=root HOSTNAME=localhost on node worker",
    "Xid (PCI:0000:17:00): 31, pid=4101, name=VLLM::Worker, Ch 00000008, MMU Fault: ENGINE GRAPHICS GPC4",
    "sha256 abababababababababababababababababababababababababababababababab GPU-3f0c1b2a-0000-1111-2222-333344445555",
    'Thread 4101 (idle): "MainThread" poll (zmq/sugar/poll.py:106)',
    "key=value; keys: [1, 2]; signature: vllm-51593; the token count; secretary",
    "--ssl-keyfile /x --max-tokens 12 --tokenizer-mode auto",
]


@pytest.mark.parametrize("text", STAYS, ids=[str(index) for index in range(len(STAYS))])
def test_what_a_verdict_is_made_of_stays(text: str) -> None:
    assert clean(text) == text


def test_the_same_value_has_the_same_pseudonym_and_others_others() -> None:
    text = "a-01:1:2 [0] NCCL INFO x on node a-01\nb-02:1:2 [0] NCCL INFO y A-01 10.0.0.1 10.0.0.2 10.0.0.1"
    redactor = Redactor(SALT)
    redactor.learn(text)
    done = redactor.text(text, "x")
    hosts = re.findall(r"host-[0-9a-f]{8}", done)
    assert [host == hosts[0] for host in hosts] == [True, True, False, True]
    addresses = re.findall(r"198\.1[89]\.\d+\.\d+", done)
    assert addresses[0] == addresses[2] != addresses[1]
    assert redactor.text("a-01 again", "y") == f"{hosts[0]} again"
    assert Redactor(b"another salt, also long").pseudonym("hosts", "a-01") != hosts[0]


def test_the_label_of_a_full_name_is_the_pseudonym_of_the_short_one() -> None:
    done = clean("tcp://gpu-07.rack3.corp:1 and gpu-07 alone")
    short = re.findall(r"host-[0-9a-f]{8}", done)
    assert len(short) == 2
    assert short[0] == short[1]


def test_a_name_known_from_the_machine_goes_even_if_nothing_marks_it() -> None:
    assert "titan" not in clean("ran on titan", hosts=["titan"])
    assert clean("ran on titan") == "ran on titan"
    assert clean("kernel and root wait", hosts=["kernel"], users=["root"]) == "kernel and root wait"


def test_a_host_called_like_a_word_of_the_trade_does_not_eat_the_log() -> None:
    text = "HOSTNAME=worker USER=drain /home/barrier/x\nworker waits at the barrier while requests drain"
    assert clean(text) == text


def test_a_user_called_like_a_word_of_a_log_line_goes_only_where_a_user_stands() -> None:
    done = clean("/home/grace/x ls\nworkers still running after grace period")
    assert done.startswith("/home/user-")
    assert done.endswith("workers still running after grace period")


def test_redacting_twice_changes_nothing_more() -> None:
    text = "\n".join(text for text, _ in GONE)
    redactor = Redactor(SALT)
    redactor.learn(text)
    once = redactor.text(text, "x")
    assert redactor.text(once, "x") == once


def test_keep_keeps_kinds_and_texts_and_never_secrets() -> None:
    text = "gpu-07:1:2 [0] x 10.0.0.1 /home/alice hf_QmFzZTY0VG9rZW5BQkNE"
    kinds, texts = parse_keep(["ips", "text:GPU-07"])
    done = clean(text, keep_kinds=kinds, keep_texts=texts)
    assert "10.0.0.1" in done
    assert "gpu-07" in done
    assert "alice" not in done
    assert "hf_" not in done
    for word in ("secrets", "hosts,ips", "host", "", "text:"):
        with pytest.raises(KeepError):
            parse_keep([word])


def test_hide_hides_what_nothing_else_finds() -> None:
    assert "Acme" not in clean("the Acme model, ACME", hide=["acme"])


def test_the_tally_says_where_and_never_what() -> None:
    text = "line one\nUSER=alice\nx 10.0.0.1\nalice 10.0.0.1\n"
    redactor = Redactor(SALT)
    redactor.learn(text)
    redactor.text(text, "evidence/a.log", 11)
    document = redactor.tally.document()
    assert [item["kind"] for item in document] == ["users", "ips"]
    assert {(place["rule"], tuple(place["lines"])) for place in document[0]["places"]} == {
        ("user variable", (12,)),
        ("name seen elsewhere", (14,)),
    }
    assert document[1]["replaced"] == 2
    assert document[1]["different_values"] == 1
    assert document[1]["places"][0]["lines"] == [13, 14]
    assert "alice" not in str(document)
    assert set(KINDS) >= {item["kind"] for item in document}


def test_documents_go_by_their_keys() -> None:
    redactor = Redactor(SALT)
    redactor.seal()
    document = {
        "hf_token": "abc",
        "max_tokens": 12,
        "hostname": "titan",
        "user": "mallory",
        "owner": "root",
        "prompt": "what I asked",
        "plan": {"prompt": [200, 1800]},
        "messages": [{"role": "user", "content": "ill"}],
        "output_token_ids": [5, -1, [7]],
        "versions": {"z3": "4.15.4.0"},
        "driver": "580.10.20.30",
        "command": ["x", "--api-key", "kkk-1", "--url", "http://gpu-9:80"],
        "address": "10.0.0.1",
        "sha256": "ab" * 32,
        "n": None,
        "ok": True,
    }
    done = redact_json(redactor, document, "run.json")
    assert done["hf_token"].startswith("redacted-secret-")
    assert done["hostname"].startswith("host-")
    assert done["user"].startswith("user-")
    assert done["owner"] == "root"
    assert done["prompt"].endswith(", 12 characters]")
    assert done["plan"] == {"prompt": [200, 1800]}
    assert "ill" not in str(done["messages"])
    assert done["messages"][0]["role"] == "user"
    assert done["output_token_ids"] == [0, -1, [0]]
    assert (done["versions"], done["driver"]) == ({"z3": "4.15.4.0"}, "580.10.20.30")
    assert "kkk-1" not in str(done["command"])
    assert len(done["command"]) == 5
    assert "gpu-9" not in str(done["command"])
    assert (done["max_tokens"], done["sha256"], done["n"], done["ok"]) == (12, "ab" * 32, None, True)
    places = {place["file"] for item in redactor.tally.document() for place in item["places"]}
    assert "run.json#hostname" in places


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKeys", "HF-Token", "aws_secret_access_key", "x-api-key", "password", "token", "Set-Cookie", "access_token"],
)
def test_keys_of_secrets(key: str) -> None:
    assert is_secret_key(key.replace("apiKeys", "api_keys"))


@pytest.mark.parametrize(
    "key",
    [
        "max_tokens",
        "token_ids",
        "pad_token",
        "eos_token_id",
        "key",
        "tokenizer",
        "signature",
        "num_tokens",
        "keys",
        "author",
        "monkey",
    ],
)
def test_keys_of_other_things(key: str) -> None:
    assert not is_secret_key(key)


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_the_verdict_of_every_labelled_case_survives(path: Path) -> None:
    lines = path.read_text("utf-8").split("\n")[1:]
    text = "\n".join(line for line in lines if not line.startswith("# ") or line.startswith(("# HELP", "# TYPE")))
    before, after = (autopsy_case(read_text("evidence.txt", version)).diagnosis for version in (text, clean(text)))
    assert (before.verdict.class_, before.verdict.cause, before.verdict.confidence, before.verdict.signature) == (
        after.verdict.class_,
        after.verdict.cause,
        after.verdict.confidence,
        after.verdict.signature,
    )
    assert [wait.model_dump() for wait in before.waits] == [wait.model_dump() for wait in after.waits]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text_keeps_its_lines_and_raises_nothing(text: str) -> None:
    assert clean(text).count("\n") == text.count("\n")


@given(
    st.from_regex(r"[A-Za-z0-9_/+=-]{8,40}", fullmatch=True),
    st.sampled_from(["--api-key {}", "HF_TOKEN={}", "{{'api_key': '{}'}}", '"password": "{}"', "Bearer {}"]),
)
@settings(max_examples=200, deadline=None)
def test_whatever_the_secret_is_it_goes(secret: str, form: str) -> None:
    if (
        secret.isdigit()
        or set(secret) <= set("*x.-_ ")
        or secret.startswith("-")
        or secret.lower() in ("redacted", "optional", "required")
    ):
        return
    assert secret not in clean("start " + form.format(secret) + " end").replace("redacted-secret", "")


HOSTILE = {
    "letters": "a" * (1 << 19),
    "dots": "a." * (1 << 18),
    "colons": "a:" * (1 << 18),
    "urls": "http://" * (1 << 16),
    "dashes": "--" * (1 << 18),
    "quotes": "'" * (1 << 19),
    "prompts": "prompt='" * (1 << 16),
    "lists": "token_ids=[" * (1 << 15),
    "at": "a@" * (1 << 18),
    "hex": "ab:" * (1 << 17),
    "keys": "api_key: " * (1 << 16),
    "homes": "/home/" * (1 << 16),
    "escapes": "\x1b]" * (1 << 18),
    "keyfiles": "-----BEGIN PRIVATE KEY-----" * (1 << 14),
    "brackets": "[(" * (1 << 18),
    "nul": "\0" * (1 << 19),
    "newlines": "\n" * (1 << 19),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_long(name: str) -> None:
    """Half a megabyte of the worst each rule can meet: linear, so far below this."""
    began = time.process_time()
    clean(HOSTILE[name])
    assert time.process_time() - began < 6
