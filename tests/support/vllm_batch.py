"""A batch of requests that behaves as the one in vLLM's V1 worker does, and what a helper makes of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.vllm import Proposer
from paceline.vllm.step_message import RowTokens

GARBAGE = 7


class VllmBatch:
    """Rows of token ids; rows that leave are filled with the last one, and what lies behind a row's end is garbage."""

    def __init__(self, most_rows: int = 8, max_model_len: int = 512) -> None:
        self.token_ids = np.full((most_rows, max_model_len), GARBAGE, np.int32)
        self.lengths = np.zeros(most_rows, np.int32)
        self.rows: list[str] = []
        self.texts: dict[str, list[int]] = {}
        self.sampling: dict[str, Any] = {}
        # Steps for which a row's prompt is still being read.
        self.reading: dict[str, int] = {}

    def admit(self, name: str, prompt: Sequence[int], reading: int = 0, **sampling: Any) -> None:
        """A new request, whose prompt is read in so many steps before the one that brings its first token."""
        self.texts[name] = list(prompt)
        self.sampling[name] = sampling_params(**sampling)
        self.reading[name] = reading
        self.rows.append(name)
        self._write(len(self.rows) - 1)

    def end(self, name: str) -> None:
        """A request is over."""
        place, last = self.rows.index(name), self.rows.pop()
        if last != name:
            self.rows[place] = last
            self._write(place)
        del self.texts[name], self.sampling[name]

    def step(self, sample: Callable[[str], Sequence[int]] | None = None) -> list[list[int]]:
        """Commits what each row samples; returns that, for `propose`."""
        sampled = []
        for place, name in enumerate(self.rows):
            tokens = [] if self.reading[name] else list(sample(name) if sample else [len(self.texts[name])])
            self.reading[name] = max(0, self.reading[name] - 1)
            self.texts[name] += tokens
            self._write(place)
            sampled.append(tokens)
        return sampled

    def show(self, proposer: Proposer, verified: Mapping[str, Sequence[int]]) -> None:
        """Shows a proposer the requests of a step, and the guesses that it has verified, as the plug-in does."""
        requests = {name: SimpleNamespace(sampling_params=params) for name, params in self.sampling.items()}
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=self.rows), requests=requests)
        proposer.see(runner, SimpleNamespace(scheduled_spec_decode_tokens=verified))

    def _write(self, place: int) -> None:
        text = self.texts[self.rows[place]]
        self.token_ids[place, : len(text)] = text
        # Guesses of the next step lie there.
        self.token_ids[place, len(text) : len(text) + 3] = GARBAGE
        self.lengths[place] = len(text)


def sampling_params(**given: Any) -> Any:
    """As much of vLLM's sampling parameters as the tier reads."""
    return SimpleNamespace(**{"min_p": 0.0, "logit_bias": None, "logprob_token_ids": None, "extra_args": None} | given)


class HeldSessions:
    """What a helper holds of the sessions that it was told of."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def take(self, rows: Sequence[RowTokens], closed: Sequence[int] = ()) -> None:
        """Adds a step; one that does not go on from what is known is an error of the teller."""
        for row in rows:
            held = self.tokens.setdefault(row.session, []) if row.base_len == 0 else self.tokens[row.session]
            if len(held) != row.base_len:
                raise AssertionError(f"session {row.session} has {len(held)} tokens, not {row.base_len}")
            held.extend(row.token_ids)
        for session in closed:
            del self.tokens[session]


def vllm_config(folder: str, vocab_size: int = 1000, max_model_len: int = 512, **parallel: int) -> Any:
    """As much of vLLM's configuration as a proposer reads."""
    ranks: Mapping[str, int] = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_rank": 0,
    }
    return SimpleNamespace(
        additional_config={"paceline": {"drafters": ["127.0.0.1:8201"]}},
        instance_id="17",
        model_config=SimpleNamespace(
            tokenizer=folder,
            model=folder,
            tokenizer_revision=None,
            revision=None,
            max_model_len=max_model_len,
            get_vocab_size=lambda: vocab_size,
        ),
        parallel_config=SimpleNamespace(**{**ranks, **parallel}),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=4, method="custom_class", model="paceline.vllm.Proposer"
        ),
    )
