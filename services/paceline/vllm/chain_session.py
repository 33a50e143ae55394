"""One row of vLLM in the tier: its committed tokens, the tree of guesses, and its drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.link import SessionLink
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.session import VerifierSession
from paceline.forest import Forest

# vLLM judges a guess by the target's probability of it alone, so the best guess is the drafter's likeliest token.
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class ChainSession(VerifierSession):
    """A session from its first step in vLLM to its last.

    Args:
        session_id: Its name at drafters.
        token_ids: Its tokens so far.
        max_model_len: Most tokens, prompt and output.
        max_chain: Most guesses in a step.
        methods: Of drafters that may draft for it.
        drafter_address: Of its drafter; empty: none.
        forest: Where its tree is.
        calibrations: Numbers of those of its drafter.
        price: The first price for its drafter.

    Attributes:
        verifies: The guesses that the step under way verifies.
        reads: Its prompt is being read.
        has_sources: No: vLLM's own guesses, if any, are not known here.
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
        forest: Forest,
        calibrations: Mapping[str, int],
        price: float,
    ) -> None:
        request = GenerateRequest(
            session_id=session_id,
            epoch=0,
            prompt_token_ids=tuple(token_ids),
            sampling=GREEDY,
            speculation=SpeculationParams(),
        )
        super().__init__(request, forest, calibrations)
        self.link = SessionLink(self, drafter_address, price=price)
        self.has_sources = False
        self.verifies: list[int] = []
        self.reads = False
        self.methods = methods
        self._max_model_len = max_model_len
        self._max_chain = max_chain

    @property
    def cap(self) -> int:
        """Most guesses in the next step; guesses beyond the last token would be wasted."""
        return max(0, min(self._max_chain, self._max_model_len - self.committed_len - 1))

    @property
    def may_wait(self) -> bool:
        """Always true: its end is not known."""
        return True

    @property
    def takes_chains(self) -> bool:
        """True: vLLM verifies no trees."""
        return True
