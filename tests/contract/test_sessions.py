"""Whatever happens between the tiers, the committed tokens are those of plain decoding."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import Commit
from tests.contract.fleet import ToyDrafter, ToyFleet, plain_text
from tests.support.trees import nodes_of, seen


def run_to_end(fleet: ToyFleet) -> list[int]:
    """Plays rounds with a perfect link until the session is done."""
    while not fleet.done:
        fleet.exchange()
        for _ in range(4):
            fleet.grow()
            fleet.exchange()
        fleet.verify()
    return fleet.session.tokens


@pytest.mark.parametrize("policy", [FixedGamma(gamma=0), FixedGamma(gamma=1), FixedGamma(gamma=8), Goodput()])
@pytest.mark.parametrize("width", [1, 3])
def test_gamma_and_tree_shape_leave_the_tokens_alone(policy, width):
    fleet = ToyFleet(policy=policy)
    fleet.drafter.width = width
    assert run_to_end(fleet) == plain_text(fleet.prompt, fleet.seed, fleet.length)


def test_good_drafts_save_steps():
    fleet = ToyFleet(length=80)
    run_to_end(fleet)
    record = fleet.tally.record()
    assert record.num_accepted_draft_tokens + record.num_steps == 80 - len(fleet.prompt)
    assert record.num_steps < 40
    assert record.mean_acceptance_length > 2


def test_a_dead_drafter_costs_steps_and_nothing_else():
    fleet = ToyFleet()
    fleet.kill()
    while not fleet.done:
        fleet.verify()
    assert fleet.session.tokens == plain_text(fleet.prompt, fleet.seed, fleet.length)
    assert fleet.tally.record().num_spec_steps == 0


def test_a_restarted_drafter_asks_for_what_it_misses():
    fleet = ToyFleet()
    fleet.exchange()
    fleet.kill()
    fleet.verify()
    fleet.exchange()
    assert fleet.mirror.tokens == fleet.session.tokens


def test_a_lost_commit_is_asked_for_again():
    fleet = ToyFleet()
    fleet.exchange()
    fleet.verify()
    fleet.link.to_drafter.clear()
    fleet.verify()
    fleet.exchange()
    assert fleet.mirror.tokens == fleet.session.tokens


def test_both_ends_hold_the_same_tree_after_every_exchange():
    fleet = ToyFleet()
    while not fleet.done:
        fleet.exchange()
        fleet.grow()
        fleet.exchange()
        mirror = fleet.mirror.tree
        here = [(node.position, node.token_id) for node in nodes_of(fleet.session.tree)]
        there = [(node.position, node.token) for node in mirror.nodes()]
        assert here == there
        fleet.verify()


def test_a_late_message_still_helps_where_it_was_right():
    fleet = ToyFleet()
    fleet.drafter.skill = 10
    fleet.exchange()
    for _ in range(4):
        fleet.grow()
    fleet.verify()
    fleet.verify()
    while fleet.link.to_verifier:
        fleet.deliver_to_verifier()
    assert fleet.session.tree.num_nodes > 0
    assert all(node.position >= len(fleet.session.tokens) for node in nodes_of(fleet.session.tree))


def test_messages_of_an_older_owner_are_dropped_on_both_sides():
    fleet = ToyFleet()
    fleet.exchange()
    fleet.grow()
    fleet.migrate()
    fleet.deliver_to_verifier()
    assert fleet.session.tree.num_nodes == 0
    fleet.exchange()
    assert fleet.mirror.tokens == fleet.session.tokens


def test_a_commit_that_contradicts_earlier_ones_is_the_peers_error():
    fleet = ToyFleet()
    fleet.exchange()
    fleet.verify()
    fleet.exchange()
    wrong = (fleet.session.tokens[3] + 1) % 5
    with pytest.raises(RemoteProtocolError, match="contradicts"):
        fleet.mirror.receive(Commit(number=1, base_len=3, token_ids=[wrong], price=0.0, room=4))


@pytest.mark.parametrize("base_len", [0, 99])
def test_guesses_beyond_the_committed_tokens_are_the_peers_error(base_len):
    fleet = ToyFleet()
    with pytest.raises(RemoteProtocolError, match="base_lens"):
        fleet.session.check(base_len, has_distributions=False)


class UnreliableLink(RuleBasedStateMachine):
    """Random interleavings of steps with loss, duplication, reordering, delay, death and migration."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = ToyFleet()

    @rule(gamma=st.integers(0, 6))
    def verify(self, gamma):
        self.fleet.policy = FixedGamma(gamma=gamma)
        self.fleet.verify()

    @rule(times=st.integers(1, 4))
    def grow(self, times):
        for _ in range(times):
            self.fleet.grow()

    @precondition(lambda self: self.fleet.link.to_drafter)
    @rule(where=st.integers(0, 99), keep=st.booleans())
    def deliver_to_drafter(self, where, keep):
        self.fleet.deliver_to_drafter(where % len(self.fleet.link.to_drafter), keep=keep)

    @precondition(lambda self: self.fleet.link.to_verifier)
    @rule(where=st.integers(0, 99), keep=st.booleans())
    def deliver_to_verifier(self, where, keep):
        self.fleet.deliver_to_verifier(where % len(self.fleet.link.to_verifier), keep=keep)

    @precondition(lambda self: self.fleet.link.to_drafter)
    @rule(where=st.integers(0, 99))
    def lose_to_drafter(self, where):
        self.fleet.link.to_drafter.pop(where % len(self.fleet.link.to_drafter))

    @precondition(lambda self: self.fleet.link.to_verifier)
    @rule(where=st.integers(0, 99))
    def lose_to_verifier(self, where):
        self.fleet.link.to_verifier.pop(where % len(self.fleet.link.to_verifier))

    @rule()
    def kill_and_reopen(self):
        self.fleet.kill()
        self.fleet.reopen()

    @rule(skill=st.integers(0, 10), width=st.integers(1, 4))
    def swap_the_drafter(self, skill, width):
        self.fleet.drafter = ToyDrafter(self.fleet.seed, skill, width)

    @rule()
    def migrate(self):
        self.fleet.migrate()

    @invariant()
    def committed_tokens_are_those_of_plain_decoding(self):
        session = self.fleet.session
        assert session.tokens == plain_text(self.fleet.prompt, self.fleet.seed, len(session.tokens))

    @invariant()
    def every_node_in_the_tree_lies_beyond_the_committed_tokens(self):
        root = seen(self.fleet.session.tree)
        assert root.position + 1 == len(self.fleet.session.tokens)
        for node in root.below():
            assert node.position > root.position
            assert node.parent is not None
            assert node.survival <= node.parent.survival + 1e-12

    @invariant()
    def the_mirror_never_runs_ahead(self):
        mirror = self.fleet.drafter.sessions.get(self.fleet.session.number)
        if mirror is not None:
            assert mirror.tokens == self.fleet.session.tokens[: len(mirror.tokens)]

    def teardown(self):
        self.fleet.kill()
        self.fleet.reopen()
        assert run_to_end(self.fleet) == plain_text(self.fleet.prompt, self.fleet.seed, self.fleet.length)


TestUnreliableLink = UnreliableLink.TestCase
TestUnreliableLink.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
