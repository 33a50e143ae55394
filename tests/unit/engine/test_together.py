"""What is chosen for many sessions at once is what each one's own sampler chooses, followed down the same guesses."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.params import SamplingParams
from paceline.core.processors import UnusableLogitsError
from paceline.core.tree import Node, verified_nodes, walk
from paceline.engine.pending import HostPending, Walks, choices_of
from paceline.engine.sampler import RowSampler
from paceline.forest import Guesses

VOCAB, MOST_GUESSES = 700, 6
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.6, "min_p": 0.05},
)


def sampler_of(seed: int, **way: Any) -> RowSampler:
    return RowSampler(SamplingParams(max_tokens=9, seed=seed, **way), VOCAB, (), ())


def alone(sampler: RowSampler, rows: dict[int, np.ndarray], node: Node) -> int:
    """What a session's own sampler chooses after a node."""
    return sampler.choose(rows[id(node)], node.position + 1)


def followed(
    logits: np.ndarray, samplers: list[RowSampler], lengths: list[int], guesses: Guesses
) -> list[tuple[list[int], bool]]:
    """What the loops find: tokens, and whether there were guesses in the last one's place."""
    stops = np.cumsum(guesses.counts, dtype=np.int64)
    starts = stops - guesses.counts
    firsts = starts + np.arange(len(samplers))
    choices = choices_of([each.choice or b"" for each in samplers])
    walks = Walks(firsts, np.array(lengths), choices, starts, stops, guesses.tokens, guesses.parents)
    chosen, counts, rivals = HostPending(logits).follow(walks)
    return [
        (chosen[first : first + count].tolist(), bool(rival))
        for first, count, rival in zip(firsts, counts, rivals, strict=True)
    ]


def random_step(rng: np.random.Generator, num_sessions: int) -> tuple[np.ndarray, list[int], Guesses]:
    """Logits with few likely tokens, and trees that guess among these."""
    counts = rng.integers(0, MOST_GUESSES + 1, num_sessions, np.int32)
    logits = rng.normal(size=(int(counts.sum()) + num_sessions, VOCAB)).astype(np.float32)
    logits[:, :3] += 8.0
    columns: list[list[int]] = [[], [], []]
    lengths = rng.integers(1, 50, num_sessions).tolist()
    for length, count in zip(lengths, counts.tolist(), strict=True):
        # A node for each parent and token, as trees have them.
        names, depths = list[tuple[int, int]](), [0]
        for parent, token in itertools.islice(
            ((int(rng.integers(-1, MOST_GUESSES)), int(rng.integers(0, 3))) for _ in itertools.count()), 400
        ):
            if len(names) < count and parent < len(names) and (parent, token) not in names:
                names.append((parent, token))
                depths.append(1 + depths[parent + 1])
        assert len(names) == count
        columns[0] += [token for _, token in names]
        columns[1] += [length - 1 + depth for depth in depths[1:]]
        columns[2] += [parent for parent, _ in names]
    tokens, positions, parents = (np.array(column, np.int32) for column in columns)
    return logits, lengths, Guesses(counts, tokens, positions, parents, np.zeros_like(tokens))


def test_all_sessions_at_once_get_what_each_gets_alone() -> None:
    rng = np.random.default_rng(5)
    accepted = 0
    for _ in range(30):
        logits, lengths, guesses = random_step(rng, len(WAYS))
        samplers = [sampler_of(int(rng.integers(2**63)), **way) for way in WAYS]
        found = followed(logits, samplers, lengths, guesses)
        first = 0
        for place, (sampler, length, (tokens, rivals)) in enumerate(zip(samplers, lengths, found, strict=True)):
            root, nodes = verified_nodes([0] * length, guesses.of(place), {})
            rows = {id(node): logits[row] for row, node in enumerate((root, *nodes), first)}
            first += 1 + len(nodes)
            expected = walk(root, nodes, partial(alone, sampler, rows))
            assert tuple(tokens) == expected
            last = root
            for token in expected[:-1]:
                last = last.children[token]
            assert rivals == bool(last.children)
            accepted += len(tokens) - 1
    assert accepted > 40, "trees that are never followed prove little"


@pytest.mark.parametrize(
    "row",
    [
        np.zeros(VOCAB),
        -np.arange(VOCAB) % 3,
        np.where(np.arange(VOCAB) == 600, 0.0, -0.0),
        np.where(np.arange(VOCAB) % 2, -np.inf, -1e38),
        np.where(np.arange(VOCAB) == 699, 1e-45, 0.0),
    ],
    ids=["equal", "several-largest", "signed-zeros", "masked", "subnormal"],
)
def test_of_the_largest_logits_the_first_is_chosen(row: np.ndarray) -> None:
    row = row.astype(np.float32)
    assert sampler_of(1, temperature=0.0).choose(row, 5) == np.argmax(row)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf], ids=["nan", "negative-nan", "infinity"])
@pytest.mark.parametrize("way", WAYS[:2], ids=["greedy", "sampled"])
def test_a_session_whose_logits_leave_nothing_is_left_to_its_own_judgement(way: dict[str, float], bad: float) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 13] = bad
    samplers = [sampler_of(1, **way), sampler_of(1, **way)]
    guesses = Guesses(*np.zeros((5, 0), np.int32))._replace(counts=np.zeros(2, np.int32))
    (none, _), (some, _) = followed(logits, samplers, [1, 1], guesses)
    assert not none
    assert len(some) == 1
    with pytest.raises(UnusableLogitsError):
        samplers[0].choose(logits[0], 1)


@pytest.mark.parametrize(
    "special",
    [
        {"presence_penalty": 0.5},
        {"logit_bias": ((1, 2.0),)},
        {"bad_words": ((1, 2),)},
        {"allowed_token_ids": (1, 2)},
        {"min_tokens": 2, "stop_token_ids": (3,)},
    ],
    ids=lambda special: next(iter(special)),
)
def test_who_asks_for_more_than_logits_is_judged_alone(special: dict[str, object]) -> None:
    assert sampler_of(1, **special).choice is None
    assert sampler_of(1, top_k=3).choice is not None


def test_guesses_of_many_rows_are_ranked_as_each_sampler_ranks_them() -> None:
    rng = np.random.default_rng(8)
    logits = (3.0 * rng.normal(size=(12, VOCAB))).astype(np.float32)
    logits[5, 3] = np.nan
    samplers = [sampler_of(place, **WAYS[place % len(WAYS)]) for place in range(12)]
    rows, positions = rng.permutation(12), rng.integers(1, 99, 12)
    choices = choices_of([each.choice or b"" for each in samplers])
    found = HostPending(logits).rank(rows, positions, choices)
    for place, sampler in enumerate(samplers):
        if rows[place] == 5:
            assert not found.usable[place]
            continue
        token_ids, shares = sampler.rank(logits[rows[place]], int(positions[place]), NUM_RANKED)
        sure = confidences(np.array(shares), greedy=place % len(WAYS) == 0)
        count = len(token_ids)
        assert found.token_ids[place, :count].tolist() == token_ids
        assert found.confidences[place, :count] == pytest.approx(sure)
        assert (found.token_ids[place, count:] < 0).all()
    assert any((row < 0).any() for row in found.token_ids), "a filter leaves fewer than are ranked"
