"""One row of vLLM as the tier sees it: its committed tokens, the tree of guesses, and its drafter."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.calibration import Calibrations
from paceline.core.link import SessionLink
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.session import VerifierSession
from paceline.core.survivals import SessionSurvivals
from paceline.core.tree import Node

# vLLM judges a guess by the target's probability of it alone, so the best guess is the drafter's likeliest token.
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class ChainSession(VerifierSession):
    """A session from the first step that vLLM told of it to the last.

    Args:
        session_id: Its name at drafters.
        token_ids: Its tokens so far.
        max_model_len: Most tokens, prompt and output.
        max_chain: Most guesses in a step.
        methods: Of drafters that may draft for it.
        drafter_address: Who drafts for it; empty: nobody.
        calibrations: Of its drafter.
        price: What its drafter is told at first.

    Attributes:
        verifies: The guesses that the step under way verifies.
        reads: Its prompt is being read.
        own_survivals: None: vLLM's own guesses, if it had any, are not seen.
    """

    def __init__(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        max_model_len: int,
        max_chain: int,
        methods: Sequence[str],
        drafter_address: str,
        calibrations: Calibrations,
        price: float,
    ) -> None:
        request = GenerateRequest(
            session_id=session_id,
            epoch=0,
            prompt_token_ids=tuple(token_ids),
            sampling=GREEDY,
            speculation=SpeculationParams(),
        )
        super().__init__(request, calibrations)
        self.link = SessionLink(self, drafter_address, price=price)
        self.usual = SessionSurvivals()
        self.own_survivals: list[float] = []
        self.verifies: tuple[Node, ...] = ()
        self.reads = False
        self.methods = methods
        self._max_model_len = max_model_len
        self._max_chain = max_chain

    @property
    def cap(self) -> int:
        """Most guesses in the next step; one beyond the last token would be wasted."""
        return max(0, min(self._max_chain, self._max_model_len - self.committed_len - 1))

    @property
    def may_wait(self) -> bool:
        """Always: nobody knows how long it goes on."""
        return True

    @property
    def takes_chains(self) -> bool:
        """True: vLLM verifies no trees."""
        return True
