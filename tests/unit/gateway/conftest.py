"""Fixtures of the gateway's unit tests."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from tests.support.grammar_texts import SPECIAL_TOKENS, SPELLED, TOKENS, byte_tokenizer, grammar_vocabulary


@pytest.fixture(scope="module", params=[SPELLED, TOKENS, SPECIAL_TOKENS])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Bytes, and markers in each way that models have them."""
    return byte_tokenizer(request.param)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return grammar_vocabulary(tokenizer, tmp_path_factory.mktemp("tokenizer"))
