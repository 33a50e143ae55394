"""The same seed gives the same tokens whatever CPU computes them."""

from __future__ import annotations

import pytest
from loadtest.product import instruction_sets

from tests.support.bits import digests_with


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_logits_and_texts_of_the_demo_pair_have_the_same_bits_by_all_instructions_of_this_machine():
    sets = instruction_sets()
    if len(sets) < 2:
        pytest.skip("of the sets of instructions that are known by name, this machine has none")
    found = {name: digests_with(environment, 200) for name, environment in sets.items()}
    assert len({each.pop("cpu") for each in found.values()}) > 1, "numba compiles for different CPUs"
    own = found.pop("this machine's")
    assert all(each == own for each in found.values()), found
