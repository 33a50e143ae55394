"""What a client has of a session is held against it, wherever the tokens come from."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidRequestError, ResumeMismatchError
from paceline.core.messages import token_digest
from paceline.gateway.sessions.known_tokens import KnownTokens, check_known

TOKENS = (5, 6, 7, 8, 9)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), max_size=6), st.integers(0, 12))
def test_known_tokens_are_counted_however_they_are_grouped(steps: list[list[int]], offset: int) -> None:
    tokens = [token for step in steps for token in step]
    offset = min(offset, len(tokens))
    client = KnownTokens(offset, token_digest(tokens[:offset]))
    num_known = 0
    for step in steps:
        num = client.take(step)
        client.add(step[num:])
        num_known += num
    assert num_known == offset
    assert client.digest() == token_digest(tokens)
    client.end(len(tokens))


def test_the_digest_is_that_of_the_protocol() -> None:
    assert token_digest((5, 6)) == hashlib.sha256(bytes.fromhex("0500000006000000")).hexdigest()[:32]


def test_one_other_token_or_too_many_are_a_mismatch_before_anything_new_is_given_out() -> None:
    client = KnownTokens(3, token_digest((5, 6, 1)))
    assert client.take(TOKENS[:2]) == 2
    with pytest.raises(ResumeMismatchError, match="digest"):
        client.take(TOKENS[2:])
    client = KnownTokens(7, token_digest((*TOKENS, 1, 2)))
    client.take(TOKENS)
    with pytest.raises(ResumeMismatchError, match="ended with 5 tokens, the client has 7"):
        client.end(len(TOKENS))


def test_a_log_is_checked_as_far_as_it_reaches() -> None:
    check_known(3, token_digest(TOKENS[:3]), TOKENS)
    check_known(7, token_digest((*TOKENS, 1, 2)), TOKENS)
    check_known(0, "", TOKENS)
    with pytest.raises(ResumeMismatchError):
        check_known(3, token_digest((5, 6, 1)), TOKENS)


@pytest.mark.parametrize("digest", ["", "0" * 31, "G" * 32])
def test_a_digest_is_needed_with_an_offset(digest: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_known(1, digest, TOKENS)
    assert caught.value.field == "digest"
