"""Steps of engines on real (tiny) models: which wait for drafts, and what drafters and the policy are told."""

from __future__ import annotations

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.errors import OverloadedError
from paceline.core.params import SamplingParams
from paceline.engine.loading import load_decoder
from paceline.forest.linking import MOST_UNANSWERED
from tests.support.engines import EnginePair, prompts

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)


class Called(Goodput):
    """Four nodes of every session; drafters work when the test calls them."""

    price = 0.0

    def __init__(self, price):
        super().__init__()
        self.price = price
        self.answered = []

    @property
    def drafts(self):
        return self.price < 1.0

    def enter(self, num_sessions, *, drafters, sources):
        self.answered = []
        return drafters and self.drafts

    def allocate(self, picked, *, weights, responded=None, other_rows=0):
        self.answered = responded.tolist()
        return FixedGamma(gamma=4).allocate(picked, weights=weights)


def test_drafters_at_rest_are_told_nothing_and_of_all_at_once_when_called(tiny_pair):
    policy = Called(1.0)
    pair = EnginePair(*tiny_pair, policy=policy)
    for name, prompt in zip("ab", prompts(2), strict=True):
        pair.submit(name, prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    for _ in range(20):
        pair.round()
    assert not pair.to_drafter, "not even that there are sessions"
    policy.price = 0.0
    pair.round()
    assert policy.answered == [False, False]
    assert sorted(type(each).__name__ for each in pair.to_drafter) == ["OpenSession", "OpenSession"]
    assert all(len(each.token_ids) > 20 for each in pair.to_drafter)
    pair.round()
    pair.round()
    assert policy.answered == [True, True]
    assert pair.reports[-1].gammas == [4, 4]
    pair.to_drafter.clear()
    policy.price = 1.0
    for _ in range(5):
        pair.round()
    assert sorted((type(each).__name__, each.price) for each in pair.to_drafter) == [("Commit", 1.0)] * 2
    pair.run()
    assert all(len(each.token_ids) == 60 for each in pair.sessions.values())


def test_a_drafter_that_does_not_answer_counts_as_one_with_nothing_to_say(tiny_pair):
    policy = Called(0.0)
    pair = EnginePair(*tiny_pair, policy=policy)
    pair.submit("s", prompts(1)[0], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    answered = []
    while pair.target.has_work():
        pair.round(draft_steps=0)
        answered += policy.answered
    assert answered == [False] * MOST_UNANSWERED + [True] * (len(answered) - MOST_UNANSWERED)
    assert len(answered) > MOST_UNANSWERED


class Told(Called):
    """Keeps what it is told of steps."""

    def __init__(self, price):
        super().__init__(price)
        self.steps = []

    def observe(self, *, roots, guesses, tokens, step_s, cycle_s, other_rows=0):
        self.steps.append((roots, guesses, tokens, other_rows))


def test_the_policy_is_told_how_many_rows_of_a_step_were_guesses(tiny_pair):
    policy = Told(0.0)
    pair = EnginePair(*tiny_pair, policy=policy)
    for name, prompt in zip("ab", prompts(2), strict=True):
        pair.submit(name, prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        pair.round()
    assert [sum(report.gammas) for report in pair.reports[-4:]] == [guesses for _, guesses, *_ in policy.steps[-4:]]
    roots, guesses, tokens, other_rows = policy.steps[-1]
    assert (roots, guesses, other_rows) == (2, 8, 0)
    assert tokens == 2 + sum(pair.reports[-1].accepted)


def test_the_policy_is_told_which_steps_had_prefill_in_them(tiny_pair):
    policy = Told(1.0)
    pair = EnginePair(*tiny_pair, policy=policy)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for name, prompt in zip("abc", ([1, 2], [3, 4], [5, 6]), strict=True):
        pair.submit(name, prompt, greedy)
    pair.round(draft_steps=0)
    pair.round(draft_steps=0)
    pair.submit("late", [9, 8, 7], greedy)
    pair.round(draft_steps=0)
    pair.round(draft_steps=0)
    assert policy.steps == [(3, 0, 3, 0), (3, 0, 3, 3), (4, 0, 4, 0)], "and of steps of prefill alone nothing"


class FullDevice:
    """A model whose device has no room for some of its steps."""

    def __init__(self, decoder):
        self._decoder, self.num_launched, self.full = decoder, 0, frozenset()

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def launch(self, *arguments):
        self.num_launched += 1
        if self.num_launched in self.full:
            raise MemoryError("no room")
        return self._decoder.launch(*arguments)


def test_a_step_that_does_not_fit_ends_its_largest_session_and_no_other(tiny_pair):
    expected = EnginePair(*tiny_pair, policy=FixedGamma(gamma=3))
    decoder = FullDevice(load_decoder(tiny_pair[0], "float32", "cpu", 1))
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=3), decoder=decoder)
    for each in (expected, pair):
        for name, prompt in zip("ab", prompts(2), strict=True):
            each.submit(name, prompt, GREEDY)
    for _ in range(6):
        pair.round()
    # While guesses are verified, and while the prompts of two newcomers are read.
    for each in (expected, pair):
        each.submit("small", list(range(70, 94)), GREEDY)
    pair.submit("c", list(range(2, 62)), GREEDY)
    decoder.full = frozenset({decoder.num_launched + 1})
    for each in (expected, pair):
        each.run()
    for name in ("a", "b", "small"):
        assert pair.sessions[name].token_ids == expected.sessions[name].token_ids
    error = pair.sessions["c"].error
    assert isinstance(error, OverloadedError)
    assert "of which this session had 60" in str(error)
