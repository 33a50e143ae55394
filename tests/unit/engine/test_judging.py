"""What a step's sessions get is what their requests mean, followed down their guesses, at no more cost than that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.acceptance import SparseDraft
from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.errors import InvalidRequestError
from paceline.core.grammar import Bits
from paceline.core.messages import GenerateRequest, ModelIdentity, TokenOrigin
from paceline.core.pages import BlockPool
from paceline.core.params import COUPLED, METHODS, REJECTION, SamplingParams, SpeculationParams
from paceline.core.processors import UnusableLogitsError
from paceline.engine import judging as engine_judging
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.pending import HostPending, choices_of
from paceline.engine.sampler import Logits, RowSampler
from paceline.engine.target_session import TargetSession
from paceline.forest import Forest
from tests.support.laws import coupled_choice, dense, overlap
from tests.support.reference_sampling import RowHistory, gumbel, process
from tests.support.rounds import Tree, choose, chosen, judge, judging
from tests.support.trees import walk
from tests.unit.core.toy_models import FloatArray, laws

VOCAB, MOST_GUESSES, EOS = 700, 6, 699
IDENTITY = ModelIdentity(
    name="m", vocab_hash="h", vocab_size=VOCAB, context_len=4096, eos_token_ids=(EOS,), weights_hash="w"
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.6, "min_p": 0.05},
)
OTHER_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"temperature": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 0.9, "logit_bias": ((1, 2.0),), "bad_words": ((1, 2), (0,))},
    {"temperature": 0.5, "allowed_token_ids": (1, 2, 300)},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (2,)},
)


def sampler_of(seed: int, **way: Any) -> RowSampler:
    return RowSampler(SamplingParams(max_tokens=9, seed=seed, **way), VOCAB, (), ())


def session_of(
    committed: Sequence[int] = (), *, acceptance: str = COUPLED, grammar: Any = None, **way: Any
) -> TargetSession:
    request = GenerateRequest(
        session_id="s",
        epoch=1,
        prompt_token_ids=(3, 1),
        committed_token_ids=tuple(committed),
        sampling=SamplingParams(max_tokens=90, **way),
        speculation=SpeculationParams(acceptance=acceptance),
    )
    return TargetSession(
        request,
        1,
        IDENTITY,
        max_model_len=99,
        pool=BlockPool(8),
        forest=Forest(METHODS),
        calibrations={},
        acceptance=acceptance,
        submitted_s=0.0,
        grammar=grammar,
    )


def expected(session: TargetSession, tree: Tree, logits: Logits) -> list[int]:
    """Tokens by the reference, from its rows: that of the last committed token first."""
    request = session.request
    rows = {(): 0}
    for place, (parent, token) in enumerate(tree, start=1):
        above = next(path for path, row in rows.items() if row == parent + 1)
        rows[(*above, token)] = place

    def next_token(path: list[int]) -> int:
        history = RowHistory(
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=(*request.committed_token_ids, *path),
            eos_token_ids=IDENTITY.eos_token_ids,
        )
        weights = process(logits[rows[tuple(path)]], request.sampling, history)
        noise = gumbel(request.sampling.seed, session.committed_len + len(path), np.arange(VOCAB))
        return coupled_choice(weights, noise if request.sampling.temperature else None)

    return walk([token for _, token in tree], [parent for parent, _ in tree], next_token)


def random_trees(rng: np.random.Generator, num_sessions: int) -> tuple[Logits, list[Tree]]:
    """Logits with few likely tokens, and trees that guess among these."""
    trees = list[Tree]()
    for count in rng.integers(0, MOST_GUESSES + 1, num_sessions).tolist():
        # A node for each parent and token, as trees have them.
        names = list[tuple[int, int]]()
        for parent, token in itertools.islice(
            ((int(rng.integers(-1, MOST_GUESSES)), int(rng.integers(0, 3))) for _ in itertools.count()), 400
        ):
            if len(names) < count and parent < len(names) and (parent, token) not in names:
                names.append((parent, token))
        assert len(names) == count
        trees.append(names)
    logits = rng.normal(size=(sum(map(len, trees)) + num_sessions, VOCAB)).astype(np.float32)
    logits[:, :3] += 8.0
    return logits, trees


def test_all_sessions_of_a_step_get_what_their_requests_mean() -> None:
    rng = np.random.default_rng(5)
    accepted = {True: 0, False: 0}
    for _ in range(30):
        ways = [*WAYS, *OTHER_WAYS]
        logits, trees = random_trees(rng, len(ways))
        before = logits.copy()
        outputs = [rng.integers(0, 3, rng.integers(0, 4)).tolist() for _ in ways]
        sessions = [
            session_of(output, seed=int(rng.integers(2**63)), **way) for output, way in zip(outputs, ways, strict=True)
        ]
        step, first = judging(sessions, trees, logits), 0
        for place, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            rows = logits[first : first + 1 + len(tree)]
            first += len(rows)
            found = chosen(step, place)
            assert found == expected(session, tree, rows)[: len(found)]
            assert len(found) == len(expected(session, tree, rows)) or session.ended
            accepted[session.by_logits] += len(found) - 1
        np.testing.assert_array_equal(logits, before)
    assert min(accepted.values()) > 40, "trees that are never followed prove little"


@pytest.mark.parametrize("way", [{}, {"presence_penalty": 0.5}], ids=["together", "level by level"])
@pytest.mark.parametrize(
    ("tree", "tokens", "origins"),
    [
        ((), (1,), "plain"),
        (((-1, 1),), (0,), "recovered"),
        (((-1, 1),), (1, 0), "accepted bonus"),
        (((-1, 1), (0, 2)), (1, 2, 0), "accepted accepted bonus"),
        (((-1, 1), (0, 2)), (1, 0), "accepted recovered"),
        (((-1, 1), (0, 2), (-1, 3)), (3, 0), "accepted bonus"),
        # An end token that was drafted ends a round without a token of the target's own.
        (((-1, 1), (0, EOS)), (1, EOS), "accepted accepted"),
    ],
)
def test_the_last_token_is_plain_recovered_or_bonus_and_those_before_it_are_accepted(
    way: dict[str, Any], tree: Tree, tokens: tuple[int, ...], origins: str
) -> None:
    session, logits = session_of(temperature=0.0, **way), np.zeros((1 + len(tree), VOCAB), np.float32)
    at = 0
    for token in tokens:
        logits[at, token] = 9.0
        at = next((place for place, guess in enumerate(tree, start=1) if guess == (at - 1, token)), 0)
    committed = judge(session, tree, logits)
    assert committed.tokens == [*tokens]
    assert [TokenOrigin(each).name.lower() for each in committed.origins] == origins.split()


class Counting:
    """A grammar that allows some tokens, and counts for which texts it is asked."""

    may_end = False

    def __init__(self, *allowed: int, fails_behind: int | None = None) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._bits = np.zeros(VOCAB, np.bool_)
        self._bits[list(allowed)] = True
        self._fails_behind = fails_behind
        self._text: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> int:
        self._text += token_ids
        return len(token_ids)

    def go_back(self, count: int) -> None:
        del self._text[len(self._text) - count :]

    def allowed(self) -> Bits:
        self.asked.append(tuple(self._text))
        if self._text[-1:] == [self._fails_behind]:
            raise InvalidRequestError("grammar", "is too complex")
        return np.packbits(self._bits, bitorder="little")

    def forced(self) -> Sequence[int]:
        return ()


def test_only_rows_that_tokens_lead_to_cost_a_grammar_anything() -> None:
    grammar = Counting(1, 2, 3)
    tree = ((-1, 1), (0, 2), (1, 1), (-1, 3), (3, 1), (4, 2))
    logits = np.zeros((7, VOCAB), np.float32)
    logits[:, 0] = 20.0
    logits[[0, 1, 2], [1, 2, 3]] = 9.0
    session = session_of(temperature=0.0, grammar=grammar)
    assert judge(session, tree, logits).tokens == [1, 2, 3]
    assert grammar.asked == [(), (1,), (1, 2)]


def test_of_what_a_grammar_allows_only_what_the_request_allows_too_may_be_chosen() -> None:
    session, row = session_of(grammar=Counting(1, 2, 3), allowed_token_ids=(2, 5)), np.zeros(VOCAB, np.float32)
    session.change(row, [])
    assert np.flatnonzero(np.isfinite(row)).tolist() == [2]


def test_a_grammar_that_cannot_go_on_ends_its_session_only_where_the_text_leads() -> None:
    tree, logits = ((-1, 1), (-1, 3)), np.zeros((3, VOCAB), np.float32)
    logits[0, 1] = 9.0
    spared = session_of(temperature=0.0, grammar=Counting(1, 2, 3, fails_behind=3))
    struck = session_of(temperature=0.0, grammar=Counting(1, 2, 3, fails_behind=1))
    step = judging([struck, spared, session_of(temperature=0.0)], [tree] * 3, np.tile(logits, (3, 1)))
    assert chosen(step, 1) == [1, 1]
    assert chosen(step, 2) == [1, 0]
    with pytest.raises(InvalidRequestError, match="too complex"):
        chosen(step, 0)


def test_log_probabilities_are_of_the_rows_that_committed_tokens_were_chosen_from() -> None:
    rng = np.random.default_rng(3)
    tree = ((-1, 5), (-1, 1), (1, 2))
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    logits[[0, 2, 3], [1, 2, 4]] = 9.0
    for way in ({}, {"logit_bias": ((600, -1.0),)}):
        session = session_of(temperature=0.0, logprobs=1, **way)
        committed = judge(session, tree, logits)
        assert committed.tokens == [1, 2, 4]
        told = session.take_event().logprobs
        assert told == tuple(
            RowSampler(session.request.sampling, VOCAB, (), ()).logprobs(logits[row], token, 1)
            for row, token in zip((0, 2, 3), committed.tokens, strict=True)
        )


@pytest.mark.parametrize(
    ("most", "copies"), [(5, [[0, 1, 2, 4, 5]]), (4, [[0, 1, 2], [4, 5]]), (1, [[0, 1, 2], [4, 5]])]
)
def test_rows_of_sessions_with_log_probabilities_are_fetched_together_but_few_at_a_time(
    most: int, copies: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_judging, "READ_ROWS", most)
    logits = np.zeros((6, VOCAB), np.float32)
    logits[range(6), [1, 2, 3, 1, 5, 1]] = 9.0
    sessions = [session_of(temperature=0.0, logprobs=wanted) for wanted in (1, None, 1)]
    fetched = Mock(side_effect=lambda rows: logits[rows])
    monkeypatch.setattr(HostPending, "logits", lambda _, rows: fetched(rows))
    step = judging(sessions, [((-1, 1), (0, 2)), (), ((-1, 5),)], logits)
    assert [chosen(step, place) for place in range(3)] == [[1, 2, 3], [1], [5, 1]]
    assert [each.args[0] for each in fetched.call_args_list] == copies
    told = [session.take_event().logprobs for session in (sessions[0], sessions[2])]
    assert [[each.top[0][0] for each in logprobs] for logprobs in told] == [[1, 2, 3], [5, 1]]


def test_only_rows_that_the_host_changes_come_with_a_step() -> None:
    ways = ({}, {"presence_penalty": 1.0}, {"logprobs": 1})
    step = judging([session_of(**way) for way in ways], [((-1, 1),)] * 3, np.zeros((6, VOCAB), np.float32))
    assert step.walks.others is not None
    assert step.walks.others.tolist() == [2, 3]


@given(st.integers(2, 8).flatmap(laws), st.floats(0.0, 1.0, exclude_max=True))
def test_a_token_without_mass_is_neither_accepted_nor_drawn(probs: FloatArray, uniform: float) -> None:
    numbers, nothing = np.array([0.0, uniform]), (np.zeros(0, np.int64), np.zeros(0))
    drawn_from = np.arange(len(probs)), np.full(len(probs), 1.0 / len(probs))
    assert probs[step_kernels.accept(probs.copy(), *nothing, step_kernels.NOTHING, numbers)[0]] > 0.0
    for token_id in np.flatnonzero(probs == 0.0).tolist():
        assert probs[step_kernels.accept(probs.copy(), *drawn_from, token_id, numbers)[0]] > 0.0


def test_what_is_learned_of_a_drafter_is_how_often_its_guess_is_accepted_whatever_it_was() -> None:
    """1 - TV of each row on the committed path, the one below the last verified node included."""
    laws = np.full((2, VOCAB), 0.0)
    laws[:, :3] = [0.5, 0.3, 0.2]
    with np.errstate(divide="ignore"):
        logits = np.log(laws).astype(np.float32)
    first, second = SparseDraft(token_ids=(0, 1, 2), weights=(1, 1, 2)), SparseDraft(token_ids=(0, 1), weights=(2, 1))
    learned, lengths = set[float](), set[int]()
    for seed, token in itertools.product(range(8), range(3)):
        session = session_of(acceptance=REJECTION, seed=seed)
        session.tree.drafts = {2: first, 3: second}
        committed = judge(session, ((-1, token),), logits)
        assert len(committed.chances) == len(committed.tokens)
        learned.add(round(committed.chances[0], 6))
        lengths.add(len(committed.tokens))
        if len(committed.tokens) == 2:
            assert committed.chances[1] == pytest.approx(overlap(laws[1], dense(second, VOCAB)), abs=1e-6)
    assert (learned, lengths) == ({round(overlap(laws[0], dense(first, VOCAB)), 6)}, {1, 2})


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
    assert choose(sampler_of(1, temperature=0.0), row, 5) == np.argmax(row)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf], ids=["nan", "negative-nan", "infinity"])
@pytest.mark.parametrize(
    "way",
    [{"temperature": 0.0}, {}, {"presence_penalty": 0.5}, {"acceptance": REJECTION}],
    ids=["greedy", "sampled", "changed", "rejection"],
)
def test_a_session_whose_logits_leave_nothing_fails_alone(way: dict[str, Any], bad: float) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 13] = bad
    step = judging([session_of(**way), session_of(**way)], [(), ()], logits)
    assert len(chosen(step, 1)) == 1
    with pytest.raises(UnusableLogitsError, match="the largest is"):
        chosen(step, 0)


def test_a_session_whose_logits_cannot_be_looked_at_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPending, "logits", Mock(side_effect=MemoryError("no room")))
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 13] = np.nan
    step = judging([session_of(), session_of()], [(), ()], logits)
    assert len(chosen(step, 1)) == 1
    with pytest.raises(MemoryError):
        chosen(step, 0)


def test_guesses_of_many_rows_are_ranked_as_each_sampler_ranks_them() -> None:
    rng = np.random.default_rng(8)
    logits = (3.0 * rng.normal(size=(12, VOCAB))).astype(np.float32)
    logits[5, 3] = np.nan
    samplers = [sampler_of(place, **WAYS[place % len(WAYS)]) for place in range(12)]
    rows, positions = rng.permutation(12), rng.integers(1, 99, 12)
    choices = choices_of([each.choice for each in samplers])
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
