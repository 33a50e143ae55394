"""A row of vLLM in the tier: its committed tokens, the tree of guesses, and its drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.link import SessionLink
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.tree import DraftTree
from paceline.forest import Forest

# vLLM judges a guess by the target's probability of it alone, so the best guess is the drafter's likeliest token.
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class ChainSession:
    """A session from its first step in vLLM to its last.

    Args:
        session_id: Its name at drafters.
        number: Its name at the proposer, which it keeps when it begins anew.
        link_number: Its name in messages to drafters.
        token_ids: Its tokens so far.
        max_model_len: Most tokens, prompt and output.
        max_chain: Most guesses in a step.
        methods: Methods of drafters that may draft for it.
        drafter_address: Address of its drafter; empty: none.
        forest: Where its tree is.
        calibrations: Numbers of those of its drafter.
        price: The first price for its drafter.

    Attributes:
        verifies: The guesses that the step under way verifies.
        reads: Its prompt is being read.
        shown: Version of the tree that stands on the board: committed tokens, nodes, guesses since the last commit.
    """

    def __init__(
        self,
        session_id: str,
        number: int,
        link_number: int,
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
        self.session_id = session_id
        self.tokens = list(token_ids)
        self.tree = DraftTree(forest, self.tokens, calibrations)
        self.link = SessionLink(
            request, link_number, self.tokens, self.tree, calibrations, address=drafter_address, price=price
        )
        self.verifies: list[int] = []
        self.reads = False
        self.number = number
        self.shown = (0, 0, 0)
        self.methods = methods
        self.max_chain = max_chain
        # Its end is not known, and vLLM verifies no trees.
        forest.links.bound(
            self.tree.row,
            most_guesses=max_chain,
            last_len=max_model_len,
            waits_up_to=max_model_len,
            takes_chains=True,
        )
