"""The policy against brute force, and the policies built on it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.draft_policy import MOST_PRICE, FixedGamma, Goodput
from paceline.core.drafting_mode import ALLOWANCE, LEAST_STEPS, Mode
from paceline.core.errors import ConfigError
from paceline.core.goodput import LEAST_SURVIVAL
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepTimes
from paceline.core.target_events import Reason
from paceline.core.tree import DraftTree
from paceline.forest import ROOT, rows_of
from paceline.forest.linking import CHILD_SHARE
from tests.support.guesses import NodeGuess
from tests.support.trees import allot, merge_into, new_tree, nodes_of

FLAT = StepCost(rows=(1, 1000), seconds=(1.0, 1.0))
LINEAR = StepCost(rows=(1, 1000), seconds=(1.0, 1000.0))


def tree_of(rows) -> DraftTree:
    tree = new_tree(1)
    for index, (parent_id, token_id, confidence) in enumerate(rows, start=1):
        merge_into(tree, [NodeGuess(node_id=index, parent_id=parent_id, token_id=token_id, confidence=confidence)], 1)
    return tree


@dataclass(kw_only=True)
class Treed:
    """A session's tree, the most nodes it may have verified, and whether its drafter has answered."""

    tree: DraftTree
    cap: int
    answered: bool = True


def allocate(policy, demands, **options) -> list[list[int]]:
    answered = np.array([each.answered for each in demands if each.cap], np.bool_)
    return allot(policy, [each.tree for each in demands], [each.cap for each in demands], responded=answered, **options)


def prospect(tree, cap, *, price, child_share=CHILD_SHARE) -> tuple[float, float]:
    """Expected tokens, and the gain of the next nodes."""
    shares = np.array([child_share])
    expected, gains = tree.forest.expected_gains(rows_of([tree.row]), rows_of([cap]), np.array([price]), shares)
    return float(expected[0]), float(gains[0])


def waits(prospects, **options) -> bool:
    expected, gains = (np.array(each) for each in zip(*prospects, strict=True))
    return Goodput().waits(expected, gains, **options)


CHAIN = [(0, 1, 0.9), (1, 1, 0.8), (2, 1, 0.7), (3, 1, 0.6)]
TREES = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.floats(0.05, 0.95)), max_size=5),
    min_size=1,
    max_size=3,
)


def test_reading_between_and_beyond_the_points_of_the_table():
    cost = StepCost(rows=(1, 5, 10), seconds=(1.0, 2.0, 4.5))
    assert [cost.at(rows) for rows in (1, 3, 5, 10, 12)] == pytest.approx([1.0, 1.5, 2.0, 4.5, 5.5])


@pytest.mark.parametrize(
    ("rows", "seconds"), [((1,), (1.0,)), ((1, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1, 2), (1.0,))]
)
def test_a_table_that_is_not_monotone_is_refused(rows, seconds):
    with pytest.raises(ConfigError, match="step cost"):
        StepCost(rows=rows, seconds=seconds)


def test_when_rows_are_free_everything_is_verified_and_the_price_is_the_least():
    policy = drafting(FLAT)
    assert len(allocate(policy, [Treed(tree=tree_of(CHAIN), cap=64)])[0]) == 4
    assert policy.price == LEAST_SURVIVAL


@pytest.mark.parametrize("other_rows", [0, 100, MOST_ROWS])
def test_guesses_end_where_steps_are_no_longer_learned_and_a_prompt_takes_none_away(other_rows):
    demands = [Treed(tree=tree_of(CHAIN), cap=64) for _ in range(200)]
    policy = Goodput(FLAT)
    for _ in range(3):
        picked = allocate(policy, demands, other_rows=other_rows)
        num_nodes = sum(map(len, picked))
        assert num_nodes == MOST_ROWS - 200


def test_the_price_rises_with_load():
    prices = []
    for count in (1, 4, 16, 64):
        policy = drafting(num_sessions=count)
        allocate(policy, [Treed(tree=tree_of(CHAIN), cap=8)] * count)
        prices.append(policy.price)
    assert prices == sorted(prices)
    assert prices[0] < 0.3
    assert prices[-1] > 0.5


def test_caps_hold_for_both_policies():
    demands = [Treed(tree=tree_of(CHAIN), cap=2), Treed(tree=tree_of(CHAIN), cap=0)]
    for policy in (Goodput(FLAT), FixedGamma(gamma=3)):
        assert [len(nodes) for nodes in allocate(policy, demands)] == [2, 0]


def test_a_long_context_gets_fewer_guesses_at_a_higher_price_where_guesses_attend_at_a_cost():
    cost = StepCost(rows=(1, 100), seconds=(1.0, 12.0), context=1000.0)
    policy, demands = drafting(cost), [Treed(tree=tree_of(CHAIN), cap=8)] * 2
    weights = policy.weights(np.array([100, 8000]))
    short, long = allocate(policy, demands, weights=weights)
    assert len(long) < len(short)
    low, high = policy.prices(weights)
    assert low < policy.price < high
    alike = policy.weights(np.array([8000, 8000]))
    assert alike.tolist() == policy.weights(np.array([1, 1])).tolist() == [1.0, 1.0]
    assert len({len(nodes) for nodes in allocate(policy, demands, weights=alike)}) == 1


def test_guesses_teach_step_times_by_their_weight():
    """Sessions with short contexts get most guesses, so these take less time than mean ones would."""
    cost = StepCost(rows=(1, 100), seconds=(1.0, 12.0), context=1000.0)
    policy, demands = drafting(cost), [Treed(tree=tree_of(CHAIN), cap=8), Treed(tree=tree_of([]), cap=8)]
    weights = policy.weights(np.array([100, 8000]))
    for _ in range(200):
        guesses = sum(map(len, allocate(policy, demands, weights=weights)))
        seconds = cost.at(2) + 3.0 * guesses * weights[0] * (cost.at(3) - cost.at(2))
        policy.observe(roots=2, guesses=guesses, tokens=2 + guesses, step_s=seconds, cycle_s=seconds)
    assert guesses
    allocate(policy, demands, weights=weights)
    assert policy.step_s == pytest.approx(seconds, rel=0.05)


@given(TREES, st.integers(0, 20))
def test_no_other_set_of_nodes_has_a_higher_goodput(rows, other_rows):
    trees = [tree_of(each) for each in rows]
    demands = [Treed(tree=tree, cap=64) for tree in trees]
    times = StepTimes(DEFAULT_STEP_COST)
    picked = allocate(Goodput(), demands, other_rows=other_rows)
    survivals = [node.survival for tree in trees for node in nodes_of(tree)]
    survivals = [each for each in survivals if each >= LEAST_SURVIVAL]

    def goodput(chosen) -> float:
        # A guess costs a little besides its row.
        seconds = times.with_guesses(Mode.PLAIN, len(trees) + other_rows, len(chosen))[-1]
        return (len(trees) + sum(chosen)) / float(seconds)

    by_slot = [{node.slot: node.survival for node in nodes_of(tree)} for tree in trees]
    got = goodput([its[slot] for its, slots in zip(by_slot, picked, strict=True) for slot in slots])
    everything = (
        subset
        for count in range(len(survivals) + 1)
        for subset in itertools.combinations(sorted(survivals, reverse=True), count)
        if count <= 3 or subset == tuple(sorted(survivals, reverse=True)[:count])
    )
    assert got >= max(goodput(subset) for subset in everything) - 1e-12


@given(TREES)
def test_a_chosen_nodes_parent_is_chosen_too_and_comes_first(rows):
    trees = [tree_of(each) for each in rows]
    picked = allocate(Goodput(), [Treed(tree=tree, cap=3) for tree in trees])
    for tree, slots in zip(trees, picked, strict=True):
        parents = {node.slot: node.parent.slot for node in nodes_of(tree)}
        for index, slot in enumerate(slots):
            assert parents[slot] in (ROOT, *slots[:index])


def test_a_missed_round_is_worth_a_short_wait_and_not_a_long_one():
    missed = [prospect(new_tree(5), 8, price=0.1)]
    assert waits(missed, wait_s=0.003, step_s=0.010)
    assert not waits(missed, wait_s=0.009, step_s=0.010)


def test_nobody_waits_for_a_session_that_must_not_be_delayed_or_has_all_it_may_use():
    assert prospect(new_tree(5), 8, price=1.0)[1] == 0.0
    assert prospect(tree_of(CHAIN), 0, price=0.0)[1] == 0.0
    assert prospect(tree_of(CHAIN), 1, price=0.0)[1] == 0.0
    assert prospect(tree_of(CHAIN), 8, price=0.0, child_share=0.0)[1] == 0.0
    expected = (1 + 0.9 + 0.72 + 0.504 + 0.3024, 0.75 * 0.3024)
    assert prospect(tree_of(CHAIN), 8, price=0.0) == pytest.approx(expected)


def test_one_hungry_session_among_many_fed_ones_is_not_waited_for():
    fed = [prospect(tree_of(CHAIN), 1, price=0.0)] * 15
    assert not waits([*fed, prospect(new_tree(5), 8, price=0.0)], wait_s=0.003, step_s=0.010)


def test_drafters_whose_first_guesses_are_worth_nothing_are_waited_for_less_and_less():
    gains = [prospect(new_tree(5), 8, price=0.05, child_share=share)[1] for share in (CHILD_SHARE, 0.5, 0.2, 0.01)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.7
    assert gains[-1] == 0.0


def test_a_node_in_the_place_of_a_weaker_one_gains_what_it_is_likelier_by():
    full = tree_of([(0, 1, 0.9), (0, 2, 0.1)])
    assert prospect(full, 2, price=0.0, child_share=0.5)[1] == pytest.approx(0.9 * 0.5 - 0.1, rel=0.02)


STEEP = StepCost(rows=(1, 8, 128), seconds=(0.010, 0.012, 0.200))


def test_nodes_that_hardly_ever_match_are_left_out_even_where_rows_are_free():
    padded = StepCost(rows=(1, 8), seconds=(1.0, 1.0))
    unlikely = tree_of([(0, 1, 0.04), (0, 2, 0.03)])
    assert allocate(Goodput(padded), [Treed(tree=unlikely, cap=8)]) == [[]]


def drafting(cost: StepCost = DEFAULT_STEP_COST, num_sessions: int = 1) -> Goodput:
    """A policy that has found that drafting pays at that load."""
    policy = Goodput(cost)
    policy.mode.resume([num_sessions.bit_length() - 1, 1.0, 0.0, 2.0])
    assert policy.enter(num_sessions)
    return policy


def test_where_times_bend_a_row_is_priced_by_those_that_pay_not_by_the_one_beyond():
    bent = StepCost(rows=(1, 4, 5), seconds=(1.0, 1.3, 9.0))
    policy = drafting(bent)
    picked = allocate(policy, [Treed(tree=tree_of(CHAIN), cap=8)])
    assert len(picked[0]) == 3
    goodput = (1 + 0.9 + 0.72 + 0.504) / 1.3
    assert policy.least_survival == policy.price == pytest.approx(0.1 * goodput, rel=0.05)
    assert LEAST_SURVIVAL < policy.price < 0.3 < goodput * (9.0 - 1.3)


def test_the_price_that_drafters_receive_is_that_of_usual_steps_and_never_makes_them_idle():
    policy = drafting(STEEP, 8)
    steady = [Treed(tree=tree_of(CHAIN), cap=8) for _ in range(8)]
    allocate(policy, steady)
    usual = policy.price
    allocate(policy, [Treed(tree=tree_of([]), cap=8) for _ in range(8)])
    assert policy.price == pytest.approx(usual, rel=0.1), "one step without guesses changes little"
    before = policy.price
    allocate(policy, steady, other_rows=100)
    assert policy.price == before, "nor does a prompt"
    costly = drafting(LINEAR, 64)
    allocate(costly, [Treed(tree=tree_of(CHAIN), cap=8)] * 64)
    assert costly.price == MOST_PRICE


def test_the_price_of_a_verifier_that_decodes_plainly_makes_drafters_idle():
    policy = Goodput()
    assert not policy.enter(64)
    assert policy.price == 1.0
    policy = drafting()
    assert policy.price < 1.0
    assert not policy.enter(1, drafters=False)


def measured(policy: Goodput, cost: StepCost, answered: bool = True, num_steps: int = 100) -> list[bool]:
    """Whether each of so many steps of four sessions drafted; three of four guesses match where they are verified."""
    drafted = []
    for _ in range(num_steps):
        drafted.append(policy.enter(4))
        guesses = 0
        if drafted[-1]:
            trees = [tree_of(CHAIN if answered else []) for _ in range(4)]
            demands = [Treed(tree=tree, cap=8, answered=answered) for tree in trees]
            guesses = sum(map(len, allocate(policy, demands)))
        seconds = cost.at(4 + guesses)
        policy.observe(roots=4, guesses=guesses, tokens=4 + guesses * 3 // 4, step_s=seconds, cycle_s=seconds)
    return drafted


def beside_sources(policy: Goodput, seconds: dict[str, float], num_steps: int = 300) -> list[str]:
    """Who guessed in each of so many steps of eight sessions: with guesses each gets two tokens, without one."""
    who = []
    for _ in range(num_steps):
        drafts = policy.enter(8, drafters="drafters" in seconds, sources=True)
        who.append("drafters" if drafts else "sources" if policy.guesses else "nobody")
        guesses, step_s = 8 * policy.guesses, seconds[who[-1]]
        policy.observe(roots=8, guesses=guesses, tokens=8 + guesses, step_s=step_s, cycle_s=step_s)
    return who


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"nobody": 1.0, "sources": 1.2, "drafters": 2.5}, "sources"),
        ({"nobody": 1.0, "sources": 1.2}, "sources"),
        ({"nobody": 1.0, "sources": 1.9, "drafters": 1.2}, "drafters"),
        ({"nobody": 1.0, "sources": 2.5, "drafters": 3.0}, "nobody"),
    ],
)
def test_drafters_sources_alone_or_nobody_guess_whatever_commits_most(seconds, best):
    policy = Goodput(max_eager_batch=math.inf)
    who = beside_sources(policy, seconds)
    assert Counter(who[100:]).most_common(1)[0][0] == best
    assert who[100:].count(best) > 170
    lost = sum(seconds[each] - seconds["nobody"] * (1 + (each != "nobody")) for each in who[:200])
    assert lost < 1.5 * ALLOWANCE, "never slower than plain steps"


def test_sources_rest_in_a_rehearsal_of_plain_steps_and_are_not_asked_where_a_session_has_none():
    policy = Goodput()
    beside_sources(policy, {"nobody": 1.0, "sources": 1.2})
    policy.enter(8, drafters=True, sources=True)
    assert (policy.drafts, policy.guesses, policy.reason, policy.price) == (False, True, Reason.PAYS, 1.0)
    policy.enter(8, drafters=False, sources=False)
    assert (policy.guesses, policy.reason) == (False, Reason.NO_DRAFTER)
    policy.rehearse(False)
    policy.enter(8, drafters=True, sources=True)
    assert not policy.guesses


def test_rates_of_steps_before_the_profile_are_no_rates_of_it():
    gentle = StepCost(rows=(1, 512), seconds=(0.010, 0.020))
    policy = Goodput()
    for _ in range(8):
        policy.enter(4, drafters=False)
        policy.observe(roots=4, guesses=0, tokens=4, step_s=0.01, cycle_s=0.01)
    policy.start_from(gentle)
    assert not policy.mode.learned()
    assert measured(policy, gentle)[-1]


def test_steps_show_nothing_of_drafting_before_drafters_have_answered():
    gentle = StepCost(rows=(1, 512), seconds=(0.010, 0.020))
    policy = Goodput(gentle)
    assert measured(policy, gentle, answered=False)[LEAST_STEPS + 1]
    assert policy.mode.learned()[3] == 0.0


def test_times_are_learned_by_mode_and_not_from_steps_that_read_prompts():
    policy = drafting(STEEP)
    policy.observe(roots=1, guesses=4, tokens=2, step_s=1.0, cycle_s=1.0, other_rows=2)
    assert policy.learned()["step_times"] == {}
    policy.observe(roots=1, guesses=4, tokens=2, step_s=1.0, cycle_s=1.0)
    assert list(policy.learned()["step_times"]) == ["drafting"]
    policy.enter(1, drafters=False)
    policy.observe(roots=1, guesses=0, tokens=1, step_s=0.5, cycle_s=0.5)
    times = policy.learned()["step_times"]
    assert times["drafting"][0] == pytest.approx(1.0 / STEEP.at(5), rel=0.1)
    assert times["drafting"][0] > times["plain"][0]


def test_the_time_of_a_few_rows_of_prompts_is_left_out():
    cost = StepCost(rows=(1, 512), seconds=(0.010, 0.521))
    alone, beside = Goodput(cost), Goodput(cost)
    for policy, other_rows in ((alone, 0), (beside, 5)):
        policy.enter(1)
        seconds = 1.5 * cost.at(20 + other_rows)
        policy.observe(roots=1, guesses=19, tokens=2, step_s=seconds, cycle_s=seconds, other_rows=other_rows)
    assert beside.times.factors[Mode.PLAIN] == pytest.approx(alone.times.factors[Mode.PLAIN])
    assert beside.mode.learned() == pytest.approx(alone.mode.learned())


# A rate as a predecessor or another verifier may have learned it; 0: none.
rates = st.sampled_from((0.0, 5e-324, 1e-300, 1e-9, 0.5, 1.0, 3.0, 1e6))
learned_rates = st.lists(st.tuples(st.sampled_from((0.0, 1.0, 3.0, 4.0, 20.0)), rates, rates, rates), max_size=3)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, float]:
    """A step: its time, its rows, and what came of it, which may be nothing."""
    roots, guesses = draw(st.sampled_from((1, 2, 8, 300))), draw(st.sampled_from((0, 5, 400)))
    step_s = draw(st.sampled_from((0.0, 5e-324, 1e-9, 0.01, 1e9)))
    return {
        "roots": roots,
        "guesses": guesses,
        "tokens": draw(st.sampled_from((0, roots, roots + guesses))),
        "step_s": step_s,
        "cycle_s": step_s + draw(st.sampled_from((0.0, 0.001))),
        "other_rows": draw(st.sampled_from((0, 1, 500))),
    }


@given(learned_rates, st.lists(st.tuples(steps(), st.integers(1, 12)), max_size=6))
def test_no_step_and_nothing_that_was_learned_leads_to_an_error_in_a_later_step(learned, told) -> None:
    policy = Goodput(StepCost(rows=(1, 1000), seconds=(1e-9, 1.0)))
    policy.resume({**policy.learned(), "mode_rates": [value for row in learned for value in row]})
    for step, times in told:
        for _ in range(times):
            policy.enter(int(step["roots"]), sources=True)
            policy.observe(**step)
            assert 0.0 <= policy.price <= 1.0
    for num_sessions in (1, 2, 8, 16, 1000):
        policy.enter(num_sessions)
    successor = Goodput()
    successor.resume(policy.learned())


@pytest.mark.parametrize(("num_sessions", "goodput", "fixed"), [(1, 17, 9), (8, 136, 72), (200, MOST_ROWS, 1800)])
def test_the_most_rows_of_a_step_are_those_that_the_policy_may_choose(num_sessions, goodput, fixed):
    assert Goodput().most_rows(num_sessions) == goodput
    assert FixedGamma(gamma=8).most_rows(num_sessions) == fixed
