"""Names of prompts' beginnings, and the memory of who was sent which."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pages import BLOCK_SIZE
from paceline.gateway.fleet.prefixes import DENSE_BLOCKS, PrefixIndex, covered_tokens, prefix_blocks

TOKENS = [random.Random(0).randrange(150_000) for _ in range(5_000)]


@given(st.integers(0, 4_000), st.integers(0, 1_000))
def test_a_longer_text_has_the_names_of_its_beginning_first(length: int, more: int) -> None:
    short, long = prefix_blocks("m", TOKENS[:length]), prefix_blocks("m", TOKENS[: length + more])
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)


@pytest.mark.parametrize("changed", [0, 15, 16, 1_000, 3_000])
def test_a_changed_token_changes_all_names_that_cover_it_and_no_others(changed: int) -> None:
    other = [*TOKENS[:changed], TOKENS[changed] + 1, *TOKENS[changed + 1 :]]
    pairs = zip(prefix_blocks("m", TOKENS), prefix_blocks("m", other), strict=True)
    assert [left != right for left, right in pairs] == [
        covered_tokens(number) > changed for number in range(1, len(prefix_blocks("m", TOKENS)) + 1)
    ]


@given(st.integers(1, 2_000))
def test_names_lie_a_block_apart_at_first_and_a_32nd_of_the_text_later(number: int) -> None:
    step = covered_tokens(number + 1) - covered_tokens(number)
    assert step % BLOCK_SIZE == 0
    assert step == BLOCK_SIZE if number < DENSE_BLOCKS else 0 < step <= covered_tokens(number) / 32


def test_names_are_of_one_model_and_their_number_grows_with_the_logarithm_of_the_length() -> None:
    assert not set(prefix_blocks("m", TOKENS)) & set(prefix_blocks("n", TOKENS))
    assert [len(prefix_blocks("m", TOKENS[:length])) for length in (15, 16)] == [0, 1]
    counts = [len(prefix_blocks("m", [7] * (1_024 << doublings))) for doublings in range(8)]
    assert counts == [64, 96, 128, 160, 192, 224, 256, 288]


def test_the_longest_known_prefix_of_each_verifier_is_found_until_the_verifier_is_forgotten() -> None:
    index = PrefixIndex()
    index.add("a", [1, 2, 3])
    index.add("b", [1, 2, 9, 10])
    assert index.longest([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert index.longest([5]) == {}
    index.forget("a")
    index.forget("never seen")
    assert index.longest([1, 2, 3, 4]) == {"b": 2}
    assert index.replica_ids == ("b",)


def test_what_was_not_used_for_longest_is_forgotten_and_of_it_the_end_first() -> None:
    index = PrefixIndex(max_blocks=4)
    index.add("a", [1, 2, 3])
    index.add("a", [7, 8])
    assert index.longest([1, 2, 3]) == {"a": 2}
    index.add("a", [1, 2])
    index.add("a", [9])
    assert index.longest([1, 2, 3]) == {"a": 2}
    assert index.longest([7, 8]) == {"a": 1}


# Text i continues a random earlier one; its names are the path of indexes.
TREES = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(TREES, st.integers(1, 8))
def test_bisection_finds_what_a_walk_would_and_the_bound_holds(parents: list[int], max_blocks: int) -> None:
    index = PrefixIndex(max_blocks)
    paths: list[list[int]] = [[]]
    for number, parent in enumerate(parents, start=1):
        paths.append([*paths[parent % number], number])
        index.add("a", paths[-1])
        assert len(index) <= max_blocks
        for path in paths:
            known = [block in index._known["a"] for block in path]
            assert known == sorted(known, reverse=True)
            assert index.longest(path).get("a", 0) == sum(known)
