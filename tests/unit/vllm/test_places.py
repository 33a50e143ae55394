"""Where the tokenizer of vLLM's target lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.vllm.places import tokenizer_folder


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--target"
    snapshot = kept / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert tokenizer_folder(str(tmp_path), None) == tmp_path.resolve()


def test_a_name_of_the_hub_is_looked_up_in_the_local_cache(cache: Path) -> None:
    assert tokenizer_folder("some/target", None) == cache
    assert tokenizer_folder("some/target", "a" * 40) == cache


@pytest.mark.parametrize("name", ["some/other", "/no/such/folder"])
def test_what_is_nowhere_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor in the local cache"):
        tokenizer_folder(name, None)
