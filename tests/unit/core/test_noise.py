"""The noise is the published generator, exact to the last bit of a double, and distributed as it says."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.noise import (
    BLOCK,
    BLOCK_STREAM,
    DRAFT_STREAM,
    VERDICT_STREAM,
    exact_exp,
    exact_log,
    philox4x32,
    uniforms,
)
from tests.support.reference_sampling import block_words, gumbel, noise_words

FloatArray = npt.NDArray[np.float64]

# Random123, kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.uint64]:
    return [np.uint64(int(word, 16)) for word in text.split()]


def kolmogorov_distance(sample: FloatArray) -> float:
    """sqrt(n) times the largest distance to the Gumbel law; above 1.95 once in a thousand samples."""
    law = np.exp(-np.exp(-np.sort(sample)))
    steps = np.arange(len(sample) + 1) / len(sample)
    return math.sqrt(len(sample)) * float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))


def test_philox_gives_the_known_answers_of_random123_for_scalars_and_whole_arrays() -> None:
    for counter, key, result in KNOWN_ANSWERS:
        assert list(philox4x32(*words(counter), *words(key))) == words(result)
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS]).T
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS]).T
    expected = np.array([words(result) for _, _, result in KNOWN_ANSWERS]).T
    np.testing.assert_array_equal(np.array(philox4x32(*counters, *keys)), expected)


def test_seed_position_and_token_id_stand_where_the_contract_puts_them() -> None:
    seed, position, token_id = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 4 * 0x1234 + 3
    block = philox4x32(*words("00001234 76543210 fedcba98 00000000"), *words("89abcdef 01234567"))
    assert noise_words(seed, position, np.array([token_id]))[0] == block[3]
    blocks = philox4x32(*words("00001234 76543210 fedcba98 00000003"), *words("89abcdef 01234567"))
    assert BLOCK_STREAM == 3
    assert block_words(seed, position, np.array([2 * 0x1234])) == (blocks[0], blocks[1])
    assert block_words(seed, position, np.array([2 * 0x1234 + 1])) == (blocks[2], blocks[3])


def test_noise_is_the_race_that_the_contract_describes() -> None:
    """In decimal arithmetic, for the first of a block and for another id of it."""
    (first_word,), (place_word,) = block_words(9, 77, np.array([5]))
    place = 5 * BLOCK + (int(place_word) >> 25)
    with localcontext(prec=60):
        first = -((int(first_word) + Decimal("0.5")) / 2**32).ln() / BLOCK
        for token_id in (place, place ^ 1):
            word = int(noise_words(9, 77, np.array([token_id]))[0])
            wait = 0 if token_id == place else -((word + Decimal("0.5")) / 2**32).ln()
            expected = -(first + wait).ln()
            assert float(gumbel(9, 77, np.array([token_id]))[0]) == pytest.approx(float(expected), rel=1e-15)


def test_a_uniform_stands_where_the_contract_puts_it_and_holds_53_bits() -> None:
    block = philox4x32(*words("00000065 00000064 00000007 00000002"), *words("89abcdef 01234567"))
    first, second = uniforms(0x0123456789ABCDEF, VERDICT_STREAM, 101, 100, 7)
    assert first * 2**53 == (int(block[0]) >> 5) * 2**26 + (int(block[1]) >> 6)
    assert second * 2**53 == (int(block[2]) >> 5) * 2**26 + (int(block[3]) >> 6)


def test_no_two_streams_positions_lengths_or_parents_share_a_uniform() -> None:
    """The third error of public code: noise that was used before."""
    places = [
        (stream, position, base_len, parent_id)
        for stream in (DRAFT_STREAM, VERDICT_STREAM)
        for position in range(4)
        for base_len in range(4)
        for parent_id in range(4)
    ]
    drawn = {number for place in places for number in uniforms(3, *place)}
    assert len(drawn) == 2 * len(places)
    coupled = noise_words(3, 1, np.arange(4096))
    assert not {int(number * 2**32) for number in drawn} & set(coupled.tolist())


def relative_error(found: float, exact: Decimal) -> float:
    return float(abs((Decimal(found) - exact) / exact))


@given(st.floats(min_value=1e-300, max_value=1e300, exclude_max=True).filter(lambda value: value != 1.0))
def test_logarithm_is_within_one_unit_in_the_last_place(value: float) -> None:
    with localcontext(prec=60):
        assert relative_error(float(exact_log(np.array([value]))[0]), Decimal(value).ln()) < 2.3e-16


@given(st.integers(min_value=0, max_value=2**32 - 1), st.booleans())
def test_logarithm_of_every_uniform_is_exact_near_one_as_well(word: int, near_one: bool) -> None:
    uniform = ((2**32 - 1 - word % 1000 if near_one else word) + 0.5) * 2.0**-32
    with localcontext(prec=60):
        assert relative_error(float(exact_log(np.array([uniform]))[0]), Decimal(uniform).ln()) < 2.3e-16


@given(st.floats(min_value=-700.0, max_value=700.0))
def test_exponential_is_within_two_units_in_the_last_place(value: float) -> None:
    with localcontext(prec=60):
        assert relative_error(float(exact_exp(np.array([value]))[0]), Decimal(value).exp()) < 4.5e-16


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_noise_is_finite_and_the_first_of_a_block_has_the_most(seed: int, position: int) -> None:
    variates = gumbel(seed, position, np.arange(BLOCK))
    assert variates.dtype == np.float64
    assert np.all((variates > -3.2) & (variates < 28.0))
    (first,) = block_words(seed, position, np.array([0]))[1]
    assert np.argmax(variates) == int(first) >> 25


def test_noise_over_token_ids_positions_and_seeds_follows_the_gumbel_law() -> None:
    positions = [gumbel(21, position, np.array([5, 6])) for position in range(2_000)]
    seeds = [gumbel(seed, 3, np.array([0, 77])) for seed in range(2_000)]
    for sample in (gumbel(20, 7, np.arange(200_000)), np.concatenate(positions), np.concatenate(seeds)):
        assert kolmogorov_distance(sample) < 1.95


def test_the_best_of_a_block_follows_the_law_of_independent_noise() -> None:
    """Largest, second largest and the gap between them: what blocks decide differently from ids drawn one by one."""
    best = -np.sort(-gumbel(31, 4, np.arange(20_000 * BLOCK)).reshape(-1, BLOCK), axis=1)[:, :2]
    assert kolmogorov_distance(best[:, 0] - math.log(BLOCK)) < 1.95
    # In a race of n the time from the first to the second arrival is exponential with rate n - 1.
    gaps = (np.exp(-best[:, 1]) - np.exp(-best[:, 0])) * (BLOCK - 1)
    assert kolmogorov_distance(-np.log(gaps)) < 1.95
