"""The policy against brute force, and the policies built on it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.drafter_worth import LEAST_SURVIVAL, Demand
from paceline.core.drafting_switch import JUDGE_EVERY, MOST_UNANSWERED, Drafting
from paceline.core.errors import ConfigError
from paceline.core.link import CHILD_SHARE, ConnectedDrafter
from paceline.core.messages import NodeGuess
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.core.survivals import MOST_LOOKS, Record, SessionSurvivals, UsualSurvivals
from paceline.core.tree import DraftTree
from paceline.forest import ROOT, rows_of
from tests.support.trees import Allotted, allot, graft_into, new_tree, nodes_of

FLAT = StepCost(rows=(1, 1000), seconds=(1.0, 1.0))
LINEAR = StepCost(rows=(1, 1000), seconds=(1.0, 1000.0))


def tree_of(rows) -> DraftTree:
    tree = new_tree(1)
    for index, (parent_id, token_id, confidence) in enumerate(rows, start=1):
        graft_into(tree, [NodeGuess(node_id=index, parent_id=parent_id, token_id=token_id, confidence=confidence)], 1)
    return tree


@dataclass(frozen=True, kw_only=True)
class Treed(Demand):
    """A session, as the policies see it, and its tree."""

    tree: DraftTree


def allocate(policy, demands, **options) -> Allotted:
    return allot(policy, [each.tree for each in demands], demands, **options)


def prospect(tree, cap, *, price, child_share=CHILD_SHARE) -> tuple[float, float]:
    """Expected tokens, and the gain of the next nodes."""
    shares = np.array([child_share])
    expected, gains = tree.forest.prospects(rows_of([tree.row]), rows_of([cap]), np.array([price]), shares)
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
    assert cost.scaled(2).at(3) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("rows", "seconds"), [((1,), (1.0,)), ((1, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1, 2), (1.0,))]
)
def test_a_table_that_is_not_monotone_is_refused(rows, seconds):
    with pytest.raises(ConfigError, match="step cost"):
        StepCost(rows=rows, seconds=seconds)


def test_when_rows_are_free_everything_is_verified_and_the_price_is_the_least():
    allocation = allocate(Goodput(StepTimes(FLAT)), [Treed(tree=tree_of(CHAIN), cap=64)])
    assert len(allocation.slots[0]) == 4
    assert allocation.allocation.price == LEAST_SURVIVAL


@pytest.mark.parametrize("other_rows", [0, 100, MOST_ROWS])
def test_guesses_end_where_steps_are_no_longer_learned_and_a_prompt_takes_none_away(other_rows):
    demands = [Treed(tree=tree_of(CHAIN), cap=64, usual=SessionSurvivals()) for _ in range(200)]
    policy = Goodput(StepTimes(FLAT))
    for _ in range(3):
        allocation = allocate(policy, demands, other_rows=other_rows)
        num_nodes = sum(map(len, allocation.slots))
        assert num_nodes == MOST_ROWS - 200


def test_when_every_row_costs_a_whole_step_speculation_is_off():
    allocation = allocate(Goodput(StepTimes(LINEAR)), [Treed(tree=tree_of(CHAIN), cap=64)] * 3)
    assert allocation.slots == [[], [], []]
    assert allocation.allocation.price == 1.0


def test_the_price_rises_with_load():
    prices = [
        allocate(Goodput(), [Treed(tree=tree_of(CHAIN), cap=8)] * count).allocation.price for count in (1, 4, 16, 64)
    ]
    assert prices == sorted(prices)
    assert prices[0] < 0.3
    assert prices[-1] > 0.5


def test_caps_hold_for_both_policies():
    demands = [Treed(tree=tree_of(CHAIN), cap=2), Treed(tree=tree_of(CHAIN), cap=0)]
    for policy in (Goodput(StepTimes(FLAT)), FixedGamma(gamma=3)):
        assert [len(nodes) for nodes in allocate(policy, demands).slots] == [2, 0]


@given(TREES, st.integers(0, 20))
def test_no_other_set_of_nodes_has_a_higher_goodput(rows, other_rows):
    trees = [tree_of(each) for each in rows]
    demands = [Treed(tree=tree, cap=64) for tree in trees]
    allocation = allocate(Goodput(), demands, other_rows=other_rows)
    survivals = [node.survival for tree in trees for node in nodes_of(tree)]
    survivals = [each for each in survivals if each >= LEAST_SURVIVAL]

    def goodput(chosen) -> float:
        rows_of_step = len(trees) + other_rows + len(chosen)
        return (len(trees) + sum(chosen)) / DEFAULT_STEP_COST.at(rows_of_step)

    by_slot = [{node.slot: node.survival for node in nodes_of(tree)} for tree in trees]
    got = goodput([its[slot] for its, slots in zip(by_slot, allocation.slots, strict=True) for slot in slots])
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
    allocation = allocate(Goodput(), [Treed(tree=tree, cap=3) for tree in trees])
    for tree, slots in zip(trees, allocation.slots, strict=True):
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
    drafter = ConnectedDrafter()
    gains = []
    for _ in range(20):
        gains.append(prospect(new_tree(5), 8, price=0.05, child_share=drafter.child_share.value)[1])
        drafter.child_share.add(0.01)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.7
    assert gains[-1] == 0.0
    for _ in range(20):
        drafter.child_share.add(0.8)
    assert prospect(new_tree(5), 8, price=0.05, child_share=drafter.child_share.value)[1] > 0.7


STEEP = StepCost(rows=(1, 8, 128), seconds=(0.010, 0.012, 0.200))


def settled(count: int, drafting: StepCost, *, steps: int = 60, policy: Goodput | None = None) -> Goodput:
    """A policy after so many steps of `count` sessions that have fair chains in hand while drafters work."""
    policy = policy or Goodput(StepTimes(STEEP, STEEP))
    usual = [SessionSurvivals() for _ in range(count)]
    for _ in range(steps):
        mode = StepMode.PLAIN if policy.price >= 1.0 else StepMode.DRAFTING
        trees = [tree_of(CHAIN if mode is StepMode.DRAFTING else []) for _ in range(count)]
        demands = [Treed(tree=tree, cap=8, usual=each) for tree, each in zip(trees, usual, strict=True)]
        allocation = allocate(policy, demands)
        rows = count + sum(map(len, allocation.slots))
        cost = drafting if mode is StepMode.DRAFTING else STEEP
        policy.observe(rows=rows, guesses=rows - count, mode=mode, seconds=cost.at(rows))
    return policy


def test_one_session_is_drafted_for_and_sixty_four_are_not():
    assert settled(1, STEEP).price < 1.0
    assert settled(64, STEEP).price == 1.0


def test_drafters_rest_when_their_work_slows_steps_by_more_than_it_brings():
    assert settled(4, STEEP).price < 1.0
    slowed = settled(4, STEEP.scaled(3.0), steps=300 + 50)
    assert slowed.price == 1.0


def test_drafters_are_judged_from_their_first_answer_on():
    policy = settled(1, STEEP)
    assert policy.price < 1.0
    for answered, num_steps in ((False, MOST_UNANSWERED - 1), (True, 200)):
        silent = [Treed(tree=tree_of([]), cap=8, answered=answered, usual=SessionSurvivals())]
        prices = [allocate(policy, silent).allocation.price for _ in range(num_steps)]
        assert (1.0 in prices) is answered


def test_drafters_are_called_back_when_the_load_falls():
    busy = settled(64, STEEP)
    assert busy.price == 1.0
    assert settled(1, STEEP, steps=30, policy=busy).price < 1.0


def test_drafters_rest_where_the_sessions_own_text_says_as_much():
    def steps_drafted(own) -> int:
        costs = {StepMode.PLAIN: STEEP, StepMode.DRAFTING: STEEP.scaled(1.05)}
        policy, count, usual = Goodput(StepTimes(*costs.values())), 0, SessionSurvivals()
        for _ in range(200):
            mode = StepMode.PLAIN if policy.price >= 1.0 else StepMode.DRAFTING
            tree = tree_of(CHAIN if own or mode is StepMode.DRAFTING else [])
            allocation = allocate(policy, [Treed(tree=tree, cap=8, own=own, usual=usual)])
            rows = 1 + len(allocation.slots[0])
            policy.observe(rows=rows, guesses=rows - 1, mode=mode, seconds=costs[mode].at(rows))
            count += mode is StepMode.DRAFTING
        return count

    assert steps_drafted([]) > 180
    assert steps_drafted([0.9, 0.72, 0.5, 0.3]) < 100


def test_guesses_without_a_drafter_are_worth_a_row_while_rows_are_cheap():
    few, many = Goodput(StepTimes(STEEP)), Goodput(StepTimes(STEEP))
    own = [0.9, 0.72, 0.5, 0.3]
    allocate(few, [Treed(tree=tree_of(CHAIN), cap=8, drafted=False, own=own)])
    allocate(many, [Treed(tree=tree_of(CHAIN), cap=8, drafted=False, own=own)] * 64)
    assert few.least_survival < 0.5
    assert many.least_survival >= 1.0


def test_where_times_bend_a_row_is_priced_by_those_that_pay_not_by_the_one_beyond():
    bent = StepCost(rows=(1, 4, 5), seconds=(1.0, 1.3, 9.0))
    policy, usual = Goodput(StepTimes(bent)), SessionSurvivals()
    for _ in range(20):
        allocation = allocate(policy, [Treed(tree=tree_of(CHAIN), cap=8, usual=usual)])
    assert len(allocation.slots[0]) == 3
    goodput = (1 + 0.9 + 0.72 + 0.504) / 1.3
    assert policy.least_survival == pytest.approx(0.1 * goodput, rel=1e-3)
    assert LEAST_SURVIVAL < policy.price < 0.3 < goodput * (9.0 - 1.3)


def test_sessions_that_opted_out_change_no_price():
    policy = settled(1, STEEP)
    before = policy.price
    for _ in range(300):
        allocate(policy, [Treed(tree=tree_of([]), cap=0)] * 64)
    assert policy.price == before


def test_prefill_alone_changes_no_price():
    policy = settled(1, STEEP)
    before = policy.price
    allocate(policy, [], other_rows=100)
    assert policy.price == before


def test_a_price_is_for_all_who_share_the_steps_to_come_not_for_the_one_whose_prompt_was_short():
    policy, first = settled(64, STEEP), Treed(tree=tree_of([]), cap=8)
    assert policy.price == 1.0
    for _ in range(JUDGE_EVERY):
        allocate(policy, [first], other_rows=50, joining=[True] * 63)
    assert policy.price == 1.0, "the others are there in a moment"
    for _ in range(JUDGE_EVERY):
        allocate(policy, [first])
    assert policy.price < 1.0, "alone it has a drafter"


def test_sessions_that_join_are_taken_to_bring_drafts_as_those_that_decode():
    alone, joined = (settled(1, STEEP) for _ in range(2))
    chain = [Treed(tree=tree_of(CHAIN), cap=8, usual=SessionSurvivals()) for _ in range(4)]
    for _ in range(JUDGE_EVERY):
        allocate(alone, chain)
        allocate(joined, chain[:1], joining=[True] * 3)
    assert joined.price == pytest.approx(alone.price, rel=0.02)


def test_the_first_prompt_of_a_fleet_is_read_by_its_drafter_too_unless_drafts_are_not_wanted():
    wanted, unwanted = Goodput(StepTimes(STEEP)), Goodput(StepTimes(STEEP))
    assert allocate(wanted, [], other_rows=20, joining=[True]).allocation.price < 1.0
    assert allocate(unwanted, [], other_rows=20, joining=[False]).allocation.price == 1.0


def test_a_few_sessions_try_their_drafters_those_first_that_have_the_least_to_read():
    linear = StepCost(rows=(1, 512), seconds=(0.0108, 0.0108 + 511 * 0.0008))
    policy = Goodput(StepTimes(linear))
    demands = [Treed(tree=tree_of([]), cap=8, num_unread=100 - index, usual=SessionSurvivals()) for index in range(16)]
    prices = [allocate(policy, demands).allocation.prices for _ in range(2)][-1]
    assert [index for index, price in enumerate(prices) if price < 1.0] == [14, 15]
    assert policy.price == 1.0, "those that begin rest"


def test_drafters_that_work_for_few_are_judged_at_once_when_many_come():
    policy = settled(1, STEEP)
    assert policy.price < 1.0
    crowd = [Treed(tree=tree_of([]), cap=8, answered=False, usual=SessionSurvivals()) for _ in range(64)]
    assert allocate(policy, crowd).allocation.price == 1.0, "not one of them waits for a trial"


def test_one_prompt_says_little_of_the_steps_to_come_and_prompts_without_end_make_rows_cheap():
    # A step that is long anyway is hardly longer for a guess more.
    gentle = StepCost(rows=(1, 200), seconds=(0.010, 0.050))
    policy = settled(4, gentle, policy=Goodput(StepTimes(gentle, gentle)))
    before, demands = policy.price, [Treed(tree=tree_of(CHAIN), cap=8, usual=SessionSurvivals()) for _ in range(4)]
    prices = [allocate(policy, demands, other_rows=100 * (step == 0)).allocation.price for step in range(JUDGE_EVERY)]
    assert prices[-1] == pytest.approx(before, rel=0.1)
    prices = [allocate(policy, demands, other_rows=100).allocation.price for _ in range(100)]
    assert prices[-1] < before / 2


def test_nodes_that_hardly_ever_match_are_left_out_even_where_rows_are_free():
    padded = StepCost(rows=(1, 8), seconds=(1.0, 1.0))
    unlikely = tree_of([(0, 1, 0.04), (0, 2, 0.03)])
    assert allocate(Goodput(StepTimes(padded)), [Treed(tree=unlikely, cap=8)]).slots == [[]]


@given(TREES, st.lists(st.booleans(), min_size=3, max_size=3))
def test_sessions_whose_drafter_is_gone_share_steps_with_the_others_and_teach_nothing_about_drafters(rows, drafted):
    demands = [Treed(tree=tree_of(tree), cap=8, drafted=each) for tree, each in zip(rows, drafted, strict=False)]
    with_drafter = [replace(each, usual=SessionSurvivals()) for each in demands if each.drafted]
    for policy, some in ((Goodput(StepTimes(FLAT)), demands), (Goodput(StepTimes(FLAT)), with_drafter)):
        for _ in range(1 + JUDGE_EVERY):
            allocate(policy, some)
    assert [each.usual.in_hand.survivals is not None for each in demands] == [each.drafted for each in demands]
    for mixed, alone in zip([each for each in demands if each.drafted], with_drafter, strict=True):
        assert mixed.usual.in_hand.survivals.tolist() == alone.usual.in_hand.survivals.tolist()


def test_the_session_after_one_that_look_up_served_well_has_its_drafter_at_once():
    sure = [(index, 1, 0.99) for index in range(8)]
    policy = settled(1, STEEP.scaled(1.02), policy=Goodput(StepTimes(STEEP, STEEP.scaled(1.02))))
    usual = policy.price
    looping = Treed(tree=tree_of(sure), cap=8, own=[0.99**rank for rank in range(1, 9)])
    prices = [allocate(policy, [looping]).allocation.price for _ in range(100)]
    assert prices[-1] == 1.0, "look-up says as much as the drafter"
    fresh = Treed(tree=tree_of([]), cap=8)
    assert [allocate(policy, [fresh]).allocation.price for _ in range(JUDGE_EVERY)][-1] < 2 * usual


def test_what_sessions_have_in_hand_is_looked_at_every_few_steps():
    policy = Goodput(StepTimes(FLAT))
    demand = Treed(tree=tree_of(CHAIN), cap=12)
    allocate(policy, [demand])
    looks = []
    for _ in range(2 * JUDGE_EVERY):
        before = demand.usual.in_hand.survivals
        allocate(policy, [demand])
        looks.append(demand.usual.in_hand.survivals is not before)
    assert looks == ([False] * (JUDGE_EVERY - 1) + [True]) * 2


def test_a_new_session_is_taken_for_a_typical_one_and_what_is_not_seen_is_learned_anew():
    usual, record = UsualSurvivals(np.array([0.7, 0.56])), Record()
    assert usual.of_all([Record()], 2).tolist() == [0.7, 0.7, 0.56, 0.56]
    for _ in range(1000):
        usual.see([record], [[0.9]])
    assert record.survivals == pytest.approx([0.9, 0.0], abs=1e-3)
    assert usual.of_all([Record()], 1) == pytest.approx([0.9, 0.0], abs=1e-3)
    slow = usual.num_looks
    assert slow == MOST_LOOKS
    for _ in range(200):
        usual.forget([record])
    usual.see([record], [[0.1]])
    assert usual.typical[0] < 0.9 - 3 * 0.8 / slow


def test_a_step_that_chooses_among_unlike_trees_is_worth_more_than_their_mean():
    policy = Goodput(StepTimes(STEEP))
    sure, empty = ([(index, 1, 0.95) for index in range(8)], [])
    records = [SessionSurvivals() for _ in range(4)]
    for step in range(200):
        trees = [tree_of(sure if (step + index) % 4 == 0 else empty) for index in range(4)]
        allocate(policy, [Treed(tree=tree, cap=8, usual=each) for tree, each in zip(trees, records, strict=True)])
    assert policy.drafters._choice.value > 1.1


def test_drafters_of_which_few_answered_under_load_are_tried_again_by_a_single_session():
    slowed = STEEP.scaled(1.2)
    policy = settled(1, slowed, policy=Goodput(StepTimes(STEEP, slowed)))
    policy.drafters._answered.value, policy.drafters.switch.drafting = 0.1, Drafting.NOBODY
    alone = Treed(tree=tree_of([]), cap=8, answered=False, usual=SessionSurvivals())
    prices = []
    for _ in range(2000):
        answers = bool(prices) and prices[-1] < 1.0
        demand = replace(alone, tree=tree_of(CHAIN if answers else []), answered=answers)
        prices += allocate(policy, [demand]).allocation.prices
        policy.observe(rows=1, guesses=0, mode=StepMode.PLAIN, seconds=0.01)
    assert set(prices[:100]) == {1.0}
    assert min(prices[-50:]) < 1.0
