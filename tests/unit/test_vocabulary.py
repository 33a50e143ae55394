"""Two models may exchange token ids when their vocabularies hash equal."""

from __future__ import annotations

import json

import pytest

from paceline.checkpoints.identity import vocab_hash
from paceline.core.errors import ConfigError


def write_tokenizer(folder, vocab, added=()):
    folder.mkdir(exist_ok=True)
    content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": list(added)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return vocab_hash(folder)


def test_equal_vocabularies_hash_equal_in_whatever_order_they_are_written(tmp_path):
    one = write_tokenizer(tmp_path / "one", {"a": 0, "b": 1})
    assert one == write_tokenizer(tmp_path / "two", {"b": 1, "a": 0})
    assert one == write_tokenizer(tmp_path / "three", {"a": 0}, [{"id": 1, "content": "b"}])
    assert one == write_tokenizer(tmp_path / "unigram", [["a", -1.0], ["b", -2.0]])
    assert one != write_tokenizer(tmp_path / "swapped", {"a": 1, "b": 0})
    assert one != write_tokenizer(tmp_path / "longer", {"a": 0, "b": 1}, [{"id": 2, "content": "<end>"}])


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: save one with"):
        vocab_hash(tmp_path)
