"""The stand-in for a verifier tells a right continuation from a wrong one, which is what tests of resuming rest on."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.support.scripted_fleet import following

PROMPT = (5, 6, 7)
LETTERS = tuple(range(66, 92))


def tokens(committed: tuple[int, ...], *, seed: int = 3, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    return tuple(islice(following(seed, prompt, committed, LETTERS), 20))


def test_whoever_goes_on_with_what_was_committed_gets_the_very_next_tokens() -> None:
    whole = tokens(())
    assert tokens(whole[:8])[:12] == whole[8:]


@pytest.mark.parametrize("wrong", ["lost", "doubled", "changed", "swapped"])
def test_whoever_goes_on_with_anything_else_gets_another_text(wrong: str) -> None:
    whole = tokens(())
    known = {
        "lost": whole[:3] + whole[4:8],
        "doubled": whole[:4] + whole[3:8],
        "changed": (*whole[:3], whole[3] + 1, *whole[4:8]),
        "swapped": (whole[1], whole[0], *whole[2:8]),
    }
    assert tokens(known[wrong])[:12] != whole[8:]


def test_the_seed_and_the_prompt_decide_too() -> None:
    assert len({tokens(()), tokens((), seed=4), tokens((), prompt=(5, 6)), tokens((), prompt=(6, 5, 7))}) == 4
