"""The tier under vLLM's V2 model runner: a speculator, which `paceline.vllm.plugin` puts in.

Guesses and tokens are on the device there: a step copies what it has committed to the host, and brings the guesses
back. vLLM gets the count of each request, so nothing is verified where there is none.
"""

from __future__ import annotations

from typing import Any

from paceline.core.errors import ConfigError
from paceline.vllm.requests import HandedOut, RequestStep, TierDrafter
from paceline.vllm.settings import V2_VARIABLE, most_guesses
from paceline.vllm.tier_client import TierClient

# Where there is no guess: a token that the target can read, since vLLM verifies all of them while it warms up.
FILLER = 0


class Speculator(TierDrafter):
    """Asks the drafter tier for guesses; as vLLM's `BaseSpeculator`.

    Args:
        vllm_config: vLLM's whole configuration.
        req_states: The runner's requests: names, tokens and lengths.

    Raises:
        ConfigError: A setting of the tier is wrong, this version of vLLM was not tested, or it was asked for what the
            tier cannot serve.
    """

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    # A guess is judged by the target's probability of it alone.
    draft_logits = None

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.prefill_context_parallel_size > 1:
            raise ConfigError(f"{V2_VARIABLE}=1 with the drafter tier: prefill context parallelism is not supported")
        if getattr(vllm_config, "watermark_config", None) is not None:
            raise ConfigError(f"{V2_VARIABLE}=1 with the drafter tier: a watermark_config is not supported")
        super().__init__()
        self._states = req_states
        # Of the requests that have not ended, vLLM's sampling parameters.
        self._sampling: dict[str, Any] = {}
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._has_other_ranks = parallel.tensor_parallel_size > 1
        self.client = TierClient(vllm_config)

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Starts the helper, now that the target is loaded."""
        del cudagraph_mode
        self.client.start()

    def capture(self) -> None:
        """Does nothing: there is no model here."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: Any,
        *_: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: object,
    ) -> Any:
        """Guesses for each request of the batch, after a step.

        Args:
            input_batch: The step's input batch.
            num_sampled: int `[requests]`, tokens that each has just committed; 0 while its prompt is being read.
            dummy_run: Nothing was computed.
            num_speculative_tokens: Most guesses of a request in the next step; None: as configured.

        Returns:
            int64 `[requests, most]` on the device, `FILLER` where there is no guess.
        """
        num_rows = input_batch.num_reqs
        most = self._most if num_speculative_tokens is None else num_speculative_tokens
        guesses: list[list[int]] = [[] for _ in range(num_rows)]
        if not dummy_run:
            # On every rank, whether its client has a helper or not.
            for name in self._sampling.keys() - self._states.req_id_to_index.keys():
                del self._sampling[name]
            found = self.client.guesses(num_rows, lambda: self._step(input_batch, num_sampled))
            guesses = [chain[:most] for chain in found]
            self.handed_out = HandedOut([*input_batch.req_ids], guesses)
        padded = [[*chain, *[FILLER] * (self._most - len(chain))] for chain in guesses]
        return self._shared(self._states.draft_tokens.new_tensor(padded).reshape(num_rows, self._most))

    def admit(self, name: str, sampling: Any) -> None:
        """Notes the sampling parameters of a new request."""
        self._sampling[name] = sampling

    def _step(self, input_batch: Any, num_sampled: Any) -> RequestStep:
        """Results of a step, in one copy from the device."""
        states, slots = self._states, input_batch.idx_mapping
        lengths = states.total_len.gpu[slots]
        places = (lengths - num_sampled)[:, None] + lengths.new_tensor(range(self._most + 1))
        last = states.all_token_ids.gpu[slots[:, None], places.clamp(0, states.max_model_len - 1)]
        packed = last.new_empty((len(slots), self._most + 3))
        packed[:, 0], packed[:, 1], packed[:, 2:] = lengths, num_sampled, last
        rows = packed.tolist()
        verified = input_batch.num_draft_tokens_per_req
        return RequestStep(
            names=input_batch.req_ids,
            lengths=[row[0] for row in rows],
            sampled=[row[2 : 2 + row[1]] for row in rows],
            verified=[0] * len(rows) if verified is None else verified.tolist(),
            text=lambda row: states.all_token_ids.gpu[slots[row], : rows[row][0]].tolist(),
            live=states.req_id_to_index,
            most_guesses=lambda name: most_guesses(self._sampling.get(name)),
        )

    def _shared(self, drafts: Any) -> Any:
        """The guesses of the first rank, on every rank: each feeds its own to the target."""
        if not self._has_other_ranks:
            return drafts
        from vllm.distributed import get_tp_group  # type: ignore[import-not-found]

        return get_tp_group().broadcast(drafts, src=0)
