"""Stories of the tier under vLLM, step by step: a vLLM that only takes time, and a drafter that is told the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.drafting_mode import LEAST_STEPS
from paceline.core.messages import CloseSession, OpenSession
from paceline.core.pairing import DrafterCandidate, Pairing
from paceline.core.params import DRAFT_MODEL, EAGLE3, MAX_DRAFT_TOKENS
from paceline.core.target_events import DraftsArrived, LinkChanged
from paceline.vllm.board import SharedTrees, make_board
from paceline.vllm.chain_scheduler import WARM_UP_STEPS, ChainScheduler
from paceline.vllm.helper import MAX_EAGER_BATCH, max_eager_batch
from paceline.vllm.step_message import RowTokens, StepMessage
from tests.support.told_drafter import ToldDrafter
from tests.support.trees import nodes, seen

TEXT = [position % 97 for position in range(9000)]
MAX_LEN, MAX_CHAIN, VOCAB = 8000, 7, 100
DRAFTER = "d:1"
MEASURED = WARM_UP_STEPS + LEAST_STEPS


class Vllm:
    """Rows that follow the text; a step takes `plain_s` and `guess_s` a guess."""

    def __init__(
        self,
        policy: Goodput | None = None,
        *,
        drafter: ToldDrafter | None = None,
        plain_s: float = 0.010,
        guess_s: float = 0.0002,
        board: SharedTrees | None = None,
    ) -> None:
        self.pairing = Pairing()
        self.pairing.know([DrafterCandidate(address=DRAFTER)])
        self.tier = ChainScheduler(
            name="v",
            policy=FixedGamma(gamma=MAX_CHAIN) if policy is None else policy,
            drafters=self.pairing,
            methods=(DRAFT_MODEL,),
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            max_chain=MAX_CHAIN,
        )
        self.drafter = ToldDrafter(TEXT) if drafter is None else drafter
        self.now_s = 0.0
        self.lengths: dict[int, int] = {}
        self.chains: dict[int, list[int]] = {}
        # Guesses of a step that a session's request takes, where it says so.
        self.most: dict[int, int] = {}
        self._plain_s, self._guess_s = plain_s, guess_s
        self._known: dict[int, int] = {}
        self._num_steps = 0
        self._board = board
        self.num_taken = 0

    def reach_drafter(self, *, up: bool = True) -> None:
        self.tier.change_link(LinkChanged(address=DRAFTER, up=up), self.now_s)
        self.carry()

    def carry(self) -> None:
        """Takes messages to the drafter and back, in no time."""
        to_drafters, broken = self.tier.take_outgoing()
        assert not broken
        for address, messages in to_drafters.items():
            said = self.drafter.hear(messages)
            if said:
                self.tier.receive(DraftsArrived(address=address, messages=said, arrived_s=self.now_s))

    def begin(self, session: int, prompt_len: int = 20) -> None:
        self.lengths[session] = prompt_len

    def step(self, *, reading: Sequence[int] = (), closed: Sequence[int] = ()) -> dict[int, list[int]]:
        """One step: guesses that are in the text are accepted, one token follows; returns the new chains."""
        self.now_s += self._plain_s + self._guess_s * sum(map(len, self.chains.values()))
        for session in closed:
            del self.lengths[session]
        rows = [self._row(session, reads=session in reading) for session in self.lengths]
        self._num_steps += 1
        self.tier.commit(StepMessage(self._num_steps, self.now_s, True, rows, closed), self.now_s)
        self.carry()
        self.chains = dict(zip(self.lengths, self._taken() or self.tier.chains(), strict=True))
        return self.chains

    def _taken(self) -> list[list[int]]:
        """What is at hand on the board, if there is one and all sessions are on it; the scheduler is told."""
        if self._board is None:
            return []
        self.tier.show(self._board)
        trees = {session: self._board.read(session) for session in self.lengths}
        chains = [
            [*tree.at_hand(TEXT[tree.committed_len : self.lengths[session]], MAX_CHAIN).token_ids]
            for session, tree in trees.items()
            if tree is not None
        ]
        if len(chains) < len(trees):
            return []
        self.num_taken += 1
        self.tier.take(chains)
        return chains

    def _row(self, session: int, *, reads: bool) -> RowTokens:
        chain, length = self.chains.get(session, []), self.lengths[session]
        accepted = 0
        while accepted < len(chain) and chain[accepted] == TEXT[length + accepted]:
            accepted += 1
        if not reads:
            self.lengths[session] += accepted + 1
        base_len = self._known.get(session, 0)
        self._known[session] = self.lengths[session]
        tokens = TEXT[base_len : self.lengths[session]]
        return RowTokens(session, base_len, tokens, reads, len(chain), self.most.get(session, MAX_DRAFT_TOKENS))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()


@pytest.fixture
def vllm() -> Vllm:
    vllm = Vllm()
    vllm.begin(1)
    vllm.reach_drafter()
    vllm.run(MEASURED + 1)
    return vllm


def test_the_first_steps_say_how_fast_it_is_and_verify_nothing() -> None:
    vllm = Vllm(Goodput(max_nodes=MAX_CHAIN))
    vllm.begin(1)
    vllm.reach_drafter()
    # The first step came after nothing: one more says the time of the last.
    for _ in range(MEASURED + 2):
        assert vllm.step() == {1: []}
    assert vllm.step() != {1: []}


def test_chains_follow_the_text_and_what_they_bring_is_counted(vllm: Vllm) -> None:
    before = vllm.lengths[1]
    vllm.tier.take_report()
    chains = vllm.step()
    assert vllm.lengths[1] - before == 5
    assert chains[1] == TEXT[vllm.lengths[1] : vllm.lengths[1] + 4]
    report = vllm.tier.take_report()
    assert (report.gammas, report.accepted, report.counts["paceline:round_misses",]) == ([4], [4], 1)
    assert report.seconds == pytest.approx(0.010 + 4 * 0.0002)
    assert report.num_rows == 5


def test_guesses_that_vllm_did_not_take_are_not_counted(vllm: Vllm) -> None:
    vllm.tier.take_report()
    vllm.chains.clear()
    vllm.step()
    report = vllm.tier.take_report()
    assert (report.gammas, report.accepted, nodes(report, "accepted", "rejected")) == ([0], [], {})
    assert report.num_rows == 1


def test_guesses_are_waited_for_but_not_while_a_prompt_is_read(vllm: Vllm) -> None:
    vllm.drafter.hear = lambda messages: []  # its answer is on its way
    vllm.step()
    assert vllm.tier.patience_s(vllm.now_s) > 0.0
    vllm.begin(2)
    vllm.step(reading=[2])
    assert vllm.tier.patience_s(vllm.now_s) == 0.0


def test_a_wrong_drafter_costs_guesses_and_no_token() -> None:
    wrong = ToldDrafter([98] * len(TEXT))
    vllm = Vllm(drafter=wrong)
    vllm.begin(1)
    vllm.reach_drafter()
    vllm.run(MEASURED + 5)
    before = vllm.lengths[1]
    vllm.tier.take_report()
    vllm.step()
    assert vllm.lengths[1] == before + 1
    report = vllm.tier.take_report()
    assert report.accepted == [0]
    assert nodes(report, "accepted", "rejected").total() == report.gammas[0] > 0


def test_tokens_beyond_the_vocabulary_are_never_in_a_chain() -> None:
    vllm = Vllm(drafter=ToldDrafter([VOCAB] * len(TEXT)))
    vllm.begin(1)
    vllm.reach_drafter()
    vllm.run(MEASURED + 3)
    assert vllm.chains == {1: []}
    assert nodes(vllm.tier.take_report(), "late").total() > 0


def test_a_prompt_with_ids_beyond_the_vocabulary_is_told_to_nobody() -> None:
    vllm = Vllm()
    vllm.reach_drafter()
    vllm.tier.commit(StepMessage(1, 0.0, False, [RowTokens(1, 0, [1, VOCAB, 2])]), 0.0)
    vllm.tier.pair_anew(1.0)
    vllm.carry()
    assert not vllm.drafter.heard
    assert vllm.tier.chains() == [[]]


def test_of_a_tree_the_best_chain_is_verified(vllm: Vllm) -> None:
    tree = next(iter(vllm.tier._sessions.values())).tree
    best = next(iter(seen(tree).children.values()))
    tree.suggest(tree.root, 99, 0.2, EAGLE3)
    chains = dict(zip(vllm.lengths, vllm.tier.chains(), strict=True))
    assert chains[1][0] == best.token_id
    assert 99 not in chains[1]


def test_a_row_whose_prompt_is_read_is_drafted_for_and_verifies_nothing(vllm: Vllm) -> None:
    vllm.begin(2)
    chains = vllm.step(reading=[2])
    assert chains[1]
    assert chains[2] == []
    assert len(vllm.drafter.sessions) == 2
    assert vllm.step()[2]


def test_for_a_request_that_is_off_no_drafter_works_and_a_limited_one_gets_so_many(vllm: Vllm) -> None:
    vllm.most = {2: 0, 3: 2}
    vllm.begin(2)
    vllm.begin(3)
    for _ in range(4):
        chains = vllm.step()
    assert len(chains[1]) > 2
    assert [len(chains[session]) for session in (2, 3)] == [0, 2]
    # Of the second nobody has heard.
    assert len(vllm.drafter.sessions) == 2


def test_where_all_requests_are_off_no_drafter_is_at_work(vllm: Vllm) -> None:
    vllm.most = {2: 0}
    vllm.begin(2)
    vllm.step(closed=[1])
    assert not vllm.tier.drafts
    assert vllm.step() == {2: []}


def test_a_session_is_opened_with_room_so_that_its_first_round_drafts(vllm: Vllm) -> None:
    vllm.begin(2)
    vllm.tier.commit(StepMessage(99, vllm.now_s, True, [RowTokens(2, 0, TEXT[:20], False, 0)], (1,)), vllm.now_s)
    (messages,) = vllm.tier.take_outgoing()[0].values()
    (opened,) = [message for message in messages if isinstance(message, OpenSession)]
    assert opened.room > 0
    assert opened.price < 1.0


@pytest.mark.parametrize(
    ("drafters", "most"),
    [
        ((), MAX_EAGER_BATCH),
        (("127.0.0.1:8201",), MAX_EAGER_BATCH),
        (("10.0.0.7:8201", "localhost:8201"), MAX_EAGER_BATCH),
        (("[::1]:8201",), MAX_EAGER_BATCH),
        (("10.0.0.7:8201", "drafter.example:8201", "[fd00::7]:8201"), math.inf),
    ],
)
def test_drafters_on_other_hosts_are_tried_at_any_load(drafters: tuple[str, ...], most: float) -> None:
    assert max_eager_batch(drafters) == most


def test_what_the_board_shows_is_what_the_scheduler_would_answer_and_taking_it_counts_the_same() -> None:
    asked, looked = (
        Vllm(Goodput(max_nodes=MAX_CHAIN)),
        Vllm(Goodput(max_nodes=MAX_CHAIN), board=SharedTrees(make_board())),
    )
    for vllm in (asked, looked):
        vllm.begin(1)
        vllm.begin(2, prompt_len=30)
        vllm.reach_drafter()
        vllm.run(60)
    assert looked.num_taken > 40
    assert looked.lengths == asked.lengths
    assert looked.now_s == asked.now_s
    one, other = (vllm.tier.take_report() for vllm in (asked, looked))
    assert (one.gammas, one.accepted) == (other.gammas, other.accepted)
    for fates in (["accepted"], ["rejected"]):
        assert nodes(one, *fates) == nodes(other, *fates)


def test_a_step_that_verified_guesses_after_drafting_was_given_up_teaches_nothing() -> None:
    policy = Goodput(max_nodes=MAX_CHAIN)
    vllm = Vllm(policy)
    vllm.begin(1)
    vllm.reach_drafter()
    vllm.run(MEASURED + 4)
    assert vllm.chains[1]
    vllm.tier.take_report()
    # The proposer has taken these from the board before it heard of that.
    policy.enter(1, drafters=False)
    vllm.step()
    assert vllm.tier.take_report().seconds == 0.0


def test_a_session_that_is_over_is_closed_at_its_drafter(vllm: Vllm) -> None:
    vllm.begin(2)
    vllm.step()
    vllm.step(closed=[1])
    assert len(vllm.drafter.sessions) == vllm.tier.num_sessions == 1
    assert any(isinstance(message, CloseSession) for message in vllm.drafter.heard)


def test_a_drafter_that_is_lost_leaves_plain_steps_until_it_is_back(vllm: Vllm) -> None:
    vllm.reach_drafter(up=False)
    vllm.run(2)
    assert vllm.chains == {1: []}
    assert not vllm.tier.drafts
    vllm.reach_drafter()
    vllm.run(2)
    assert vllm.chains[1]


def test_a_session_goes_to_another_drafter_when_its_own_is_gone() -> None:
    vllm = Vllm()
    vllm.begin(1)
    vllm.reach_drafter()
    vllm.run(MEASURED + 1)
    vllm.pairing.know([DrafterCandidate(address=DRAFTER, down_s=10.0), DrafterCandidate(address="d:2")])
    vllm.tier.change_link(LinkChanged(address="d:2", up=True), vllm.now_s)
    assert vllm.tier.pair_anew(vllm.now_s) == 1
    vllm.carry()
    opened = [message for message in vllm.drafter.heard if isinstance(message, OpenSession)]
    assert len(opened[-1].token_ids) == vllm.lengths[1] > len(opened[0].token_ids)
    assert vllm.step()[1]


def test_a_chain_ends_before_the_longest_text(vllm: Vllm) -> None:
    vllm.begin(2, prompt_len=MAX_LEN - 5)
    chain = vllm.step()[2]
    assert (vllm.lengths[2], len(chain)) == (MAX_LEN - 4, 3)


def test_a_session_opened_anew_forgets_what_was_told_of_it(vllm: Vllm) -> None:
    vllm.tier.commit(StepMessage(99, vllm.now_s, True, [RowTokens(1, 0, TEXT[:50])]), vllm.now_s)
    vllm.carry()
    assert list(vllm.drafter.sessions.values()) == [50]


@pytest.mark.parametrize("row", [RowTokens(7, 10, TEXT[10:11]), RowTokens(1, 3, TEXT[3:4])])
def test_what_does_not_follow_is_refused(vllm: Vllm, row: RowTokens) -> None:
    with pytest.raises((KeyError, ValueError), match=str(row.session)):
        vllm.tier.commit(StepMessage(99, vllm.now_s, True, [row]), vllm.now_s)


def test_the_controller_drafts_where_that_pays_and_not_where_it_does_not() -> None:
    for guess_s, pays in ((0.0002, True), (0.02, False)):
        vllm = Vllm(Goodput(max_nodes=MAX_CHAIN), guess_s=guess_s)
        vllm.begin(1)
        vllm.reach_drafter()
        vllm.run(300)
        start_s, start_len = vllm.now_s, vllm.lengths[1]
        vllm.run(40)
        speed = (vllm.lengths[1] - start_len) / (vllm.now_s - start_s) * 0.010
        assert speed > 2.0 if pays else speed > 0.97


def test_a_successor_begins_where_its_predecessor_ended() -> None:
    vllm = Vllm(Goodput(max_nodes=MAX_CHAIN))
    vllm.begin(1)
    vllm.reach_drafter()
    vllm.run(100)
    learned = vllm.tier.learned()
    successor = Vllm(Goodput(max_nodes=MAX_CHAIN))
    successor.tier.resume(learned)
    again = successor.tier.learned()["policy"]
    assert again | {"mode_rates": ...} == learned["policy"] | {"mode_rates": ...}
    assert again["mode_rates"] == pytest.approx(learned["policy"]["mode_rates"])
    successor.begin(1)
    successor.reach_drafter()
    successor.run(8)
    assert successor.chains[1]


def test_who_knows_nothing_leaves_nothing_behind() -> None:
    fresh = Vllm()
    assert fresh.tier.learned()["policy"]["step_times"] == {}
    fresh.tier.resume(fresh.tier.learned())
