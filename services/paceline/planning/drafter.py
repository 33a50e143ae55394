"""A simulated drafter: the very draft scheduler of `core`, with a model that guesses what a profile says."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.draft_scheduler import DraftLimits, DraftPlan, DraftScheduler, VerifierMessages
from paceline.core.drafter_growth import Guesses
from paceline.core.messages import DraftNodes, ToDrafter
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.scheduled_draft_session import ScheduledDraftSession
from paceline.core.tree import Node, NodeState
from paceline.planning.guesses import RIGHT, STRIDE, GuessSource
from paceline.planning.profile import DrafterFacts

# Sessions of a simulation are as long as its load says; their drafters have context enough.
CONTEXT_LEN = 1 << 19
# All verifiers of a simulation speak over one stream: a session's id is its own.
LINK = 0


class SimulatedDrafter:
    """Runs the draft scheduler's steps in simulated time.

    Args:
        facts: Of the draft model on its device.
        truth: What it guesses.
    """

    def __init__(self, facts: DrafterFacts, truth: GuessSource) -> None:
        self._facts = facts
        self._truth = truth
        pool = BlockPool(facts.device.kv_tokens // BLOCK_SIZE)
        # As in the engine: a quarter as many slots for tree nodes as for tokens.
        scratch = SlotPool(first_block=pool.num_blocks, num_blocks=max(1, pool.num_blocks // 4))
        limits = DraftLimits(
            width=facts.width,
            max_rows=facts.rows,
            max_rows_per_session=facts.rows_per_session,
            max_num_batched_tokens=facts.device.max_rows,
            max_num_seqs=facts.device.max_sessions,
        )
        self.scheduler: DraftScheduler[ScheduledDraftSession] = DraftScheduler(
            pool=pool,
            scratch=scratch,
            limits=limits,
            vocab_size=STRIDE,
            open_session=lambda opened: ScheduledDraftSession(opened, pool, scratch, context_len=CONTEXT_LEN),
        )

    def handle(self, messages: Sequence[ToDrafter], now_s: float) -> None:
        """Takes in messages about sessions."""
        self.scheduler.handle(VerifierMessages(link=LINK, messages=messages), now_s)
        self.scheduler.moves.clear()

    def seconds(self, plan: DraftPlan[ScheduledDraftSession]) -> float:
        """Expected time of a step."""
        computed = [*(part.session for part in plan.catching_up), *(each.session for each in plan.growing)]
        kv_tokens = sum(len(session.tokens) for session in {id(each): each for each in computed}.values())
        device = self._facts.device
        return device.seconds(plan.num_rows, num_sessions=self.scheduler.num_sessions, kv_tokens=kv_tokens)

    def finish(self, plan: DraftPlan[ScheduledDraftSession]) -> Sequence[DraftNodes]:
        """Ends a step; returns what it has to say."""
        for part in plan.catching_up:
            if part.expands:
                self._expand(part.session, part.session.tree.root)
        for each in plan.growing:
            self._expand(each.session, each.node)
        self.scheduler.end_step()
        to_verifiers, _ = self.scheduler.take()
        return [message for message in to_verifiers.get(LINK, []) if isinstance(message, DraftNodes)]

    def _expand(self, session: ScheduledDraftSession, node: Node) -> None:
        # Position 0 is the prompt's last token.
        position = node.position + 2 - session.prompt_len
        if not is_right(node):
            # Some hundred places stand for all that lie off the text.
            position = STRIDE * (1 + node.node_id % 8) + position % 32
        ranked = self._truth.guesses(int(session.session_id), position)
        session.offer(node, Guesses(ranked=list(ranked[: self._facts.width])))


def is_right(node: Node) -> bool:
    """Whether all tokens from the root down to the node are the target's."""
    step: Node | None = node
    while step is not None and step.state is not NodeState.COMMITTED:
        if step.token_id != RIGHT:
            return False
        step = step.parent
    return True
