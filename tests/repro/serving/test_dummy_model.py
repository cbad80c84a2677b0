"""The dummy model's files: shapes that reach the defect, and a tokenizer that the library reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4_repro.errors import UsageError
from dsv4_repro.repro.serving.dummy_model import VOCABULARY, model_config, tokenizer_document, write_dummy_model


def test_the_files_are_json_and_say_what_the_drain_plan_assumes(tmp_path: Path) -> None:
    folder = write_dummy_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "deepseek_v32"
    assert (config["index_topk"], config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2048, 2, 1)
    assert config["first_k_dense_replace"] > config["num_hidden_layers"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"


def test_every_layer_count_stays_dense() -> None:
    config = model_config(120)
    assert config["num_hidden_layers"] == 120
    assert config["first_k_dense_replace"] > 120
    for count in (0, 129):
        with pytest.raises(UsageError, match="--layers"):
            model_config(count)


def test_the_words_are_numbered_without_a_gap() -> None:
    words = tokenizer_document()["model"]["vocab"]
    assert sorted(words.values()) == list(range(VOCABULARY))
    assert words["t4095"] == 4095


def test_the_tokenizer_is_read_by_the_library(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    loaded = tokenizers.Tokenizer.from_file(str(write_dummy_model(tmp_path) / "tokenizer.json"))
    assert loaded.encode("t5 t6 nonsense").ids == [5, 6, 3]
    assert loaded.decode([5, 6]) == "t5 t6"
