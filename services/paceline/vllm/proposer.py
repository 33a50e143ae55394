"""The class that vLLM's V1 model runner asks for guesses: `paceline.vllm.Proposer`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.vllm.plugin import extend_v1_runner
from paceline.vllm.requests import TOKENS, HandedOut, RequestStep, TierDrafter
from paceline.vllm.settings import most_guesses
from paceline.vllm.tier_client import TierClient


class Proposer(TierDrafter):
    """Asks the drafter tier for guesses; vLLM's worker builds it.

    Args:
        vllm_config: vLLM's whole configuration.

    Raises:
        ConfigError: A setting of the tier is wrong, or this version of vLLM was not tested.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self._names: Sequence[str] = ()
        self._requests: Mapping[str, Any] = {}
        self._verified: Mapping[str, Sequence[int]] = {}
        self.client = TierClient(vllm_config)
        extend_v1_runner()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Starts the helper, now that the target is loaded and vLLM's threads are bound to their CPUs."""
        self.client.start()

    def see(self, runner: Any, scheduler_output: Any) -> None:
        """Notes whose step it is, since vLLM asks for guesses without names.

        Args:
            runner: vLLM's model runner, which knows the requests.
            scheduler_output: The step, which says what it has verified.
        """
        self._names, self._requests = [*runner.input_batch.req_ids], runner.requests
        self._verified = scheduler_output.scheduled_spec_decode_tokens

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
        guesses = self.client.guesses(
            len(sampled_token_ids),
            lambda: self._step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu),
        )
        self.handed_out = HandedOut(self._names, guesses)
        return guesses

    def _step(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> RequestStep:
        return RequestStep(
            names=self._names,
            lengths=lengths[: len(sampled)].tolist(),
            sampled=sampled,
            verified=[len(self._verified.get(name, ())) for name in self._names],
            # From bytes: 256 rows of 2,000 tokens are opened in 5 to 11 ms instead of 42.
            text=lambda row: array(TOKENS, token_ids[row, : lengths[row]].tobytes()),
            live=self._requests,
            most_guesses=lambda name: most_guesses(self._requests[name].sampling_params),
        )
