"""Which (heads, width) pairs a model asks for, which a FlashInfer lists, and what doctor says of a pair that is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import DownloadError, EvidenceError, UsageError
from dsv4_repro.kernels import flashinfer
from dsv4_repro.repro.sparse_instances import instance_checks, listed_pairs, read_shape

V4 = {"model_type": "deepseek_v4", "num_attention_heads": 64, "index_topk": 512, "sliding_window": 128, "compress_ratios": [0, 4]}
TABLE = "_DECODE_DSV4_DISPATCH = frozenset({(16, 128), (16, 512), (64, 128)})\n_DECODE_DSV3_2_DISPATCH = frozenset({(64, 2048)})\n"


def config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in {**V4, **changes}.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "tp", "draft", "expected"),
    [
        ({}, 1, 0, ("DeepSeek-V4", 64, (128,))),
        ({}, 4, 5, ("DeepSeek-V4", 16, (128, 192))),
        ({}, 4, 64, ("DeepSeek-V4", 16, (128, 192))),
        ({}, 4, 65, ("DeepSeek-V4", 16, (128, 256))),
        ({"model_type": "deepseek_v32", "compress_ratios": None, "index_topk": 2048}, 8, 0, ("DeepSeek-V3.2", 8, (2048,))),
    ],
)
def test_what_a_model_asks_for(changes: dict[str, Any], tp: int, draft: int, expected: Any, tmp_path: Path) -> None:
    shape = read_shape(config(tmp_path, **changes), tp, draft)
    assert (shape.family, shape.heads, tuple(width for width, _ in shape.widths)) == expected


@pytest.mark.parametrize(
    "changes", [{"num_attention_heads": "64"}, {"index_topk": None}, {"sliding_window": True}, {"index_topk": 0}]
)
def test_a_configuration_without_its_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="a positive number is expected"):
        read_shape(config(tmp_path, **changes), 1)


def test_heads_that_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        read_shape(config(tmp_path), 3)


@pytest.mark.parametrize("content", ["", "[1", "[]", '{"text_config": 3}'])
def test_files_that_are_no_configuration(content: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(EvidenceError):
        read_shape(file, 1)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TABLE, {(16, 128), (16, 512), (64, 128)}),
        ("_DECODE_DSV4_DISPATCH = _DecodeDispatchEnvelope(1)", None),
        ("_DECODE_DSV4_DISPATCH = frozenset({3})", None),
        ("_DECODE_DSV4_DISPATCH = frozenset(__import__('os').system('true'))", None),
        ("x = 1", None),
    ],
)
def test_the_table_is_read_and_never_run(source: str, expected: set[tuple[int, int]] | None) -> None:
    assert listed_pairs(source, "_DECODE_DSV4_DISPATCH") == expected


def test_what_doctor_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flashinfer, "release_files", lambda _spec, names: {names[0]: TABLE.encode()})
    window, draft = instance_checks(config(tmp_path), 4, 5, "0.6.17")
    assert (window.state, draft.state) == ("yes", "no")
    assert "for 16 heads it has 128, 512" in draft.found
    (nothing,) = instance_checks(config(tmp_path), 8, 0, "0.6.17")
    assert "nothing for 8 heads" in nothing.found


def test_what_could_not_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_more: object) -> None:
        raise DownloadError("no index")

    monkeypatch.setattr(flashinfer, "release_files", fail)
    (check,) = instance_checks(config(tmp_path), 4, 0, "0.6.17")
    assert (check.state, check.found) == ("unknown", "no index")


@pytest.mark.release_wheel
@pytest.mark.parametrize(("release", "state"), [("0.6.17", "no"), ("0.6.18", "yes"), ("0.7.1", "unknown")])
def test_releases_with_a_draft_of_five(release: str, state: str, tmp_path: Path) -> None:
    checks = instance_checks(config(tmp_path), 4, 5, release)
    if checks[1].state == "unknown" and state != "unknown":
        pytest.skip(f"needs the package index: {checks[1].found}")
    assert checks[1].state == state
