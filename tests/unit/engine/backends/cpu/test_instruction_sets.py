"""The same seed gives the same tokens whatever CPU computes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from loadtest.product import instruction_sets

from tests.support.bits import digests_with


@pytest.mark.full
@pytest.mark.timeout(900)
def test_logits_and_texts_of_the_demo_pair_have_the_same_bits_by_all_instructions_of_this_machine():
    with ThreadPoolExecutor(2) as pool:
        sets = instruction_sets()
        found = dict(zip(sets, pool.map(lambda each: digests_with(each, 200), sets.values()), strict=True))
    if len({each.pop("cpu") for each in found.values()}) == 1:
        pytest.skip("this machine has no set of instructions that is known by name, or no other")
    own = found.pop("this machine's")
    assert all(each == own for each in found.values()), found
