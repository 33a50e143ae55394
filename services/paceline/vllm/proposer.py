"""The class that vLLM's V1 model runner asks for guesses: `paceline.vllm.Proposer`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.vllm.rows import RowSessions
from paceline.vllm.tier_client import TierClient


class Proposer:
    """Asks the drafter tier for guesses; vLLM's worker builds it.

    Args:
        vllm_config: vLLM's whole configuration.

    Raises:
        ConfigError: A setting of the tier is wrong, or this version of vLLM was not tested.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._sessions = RowSessions()
        self.client = TierClient(vllm_config, self._sessions)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Starts the helper, now that the target is loaded and vLLM's threads are bound to their CPUs."""
        self.client.start()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
        **_: object,
    ) -> list[list[int]]:
        """Guesses for each row of the batch, after a step.

        Args:
            sampled_token_ids: Tokens that each row has just committed; none while its prompt is being read.
            num_tokens_no_spec: `[at least rows]`; lengths, without guesses.
            token_ids_cpu: `[at least rows, max_model_len]`.

        Returns:
            A list for each row, possibly empty.
        """
        return self.client.guesses(
            len(sampled_token_ids),
            lambda now_s, most_tokens: self._sessions.observe(
                sampled_token_ids, num_tokens_no_spec, token_ids_cpu, now_s, most_tokens
            ),
        )
