"""Requests of a replay: those of a trace, fitted to the model, with prompts; and what was done to fit them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from loadtest.prompts import Prompts
from loadtest.streams import Ask
from loadtest.traffic.config import LoadConfig
from paceline.planning.arrivals import Arrival, generated_arrivals, opening, read_arrivals

# Settings that the report repeats.
DESCRIBED = ("minutes", "prompt_scale", "output_scale", "max_prompt_tokens", "max_output_tokens", "temperature")


class Source:
    """The arrivals that a configuration names, at any rate.

    Raises:
        ConfigError: The trace cannot be read.
    """

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._trace = None if config.trace is None else read_arrivals(config.trace)

    @property
    def trace_rate_per_s(self) -> float:
        """The rate of the trace's first minutes as they are; only with a trace."""
        assert self._trace is not None, "a generated trace has the rate it is asked for"
        duration_s = self._config.duration_s
        return sum(each.at_s < duration_s for each in self._trace) / duration_s

    def unfitted(self, rate_per_s: float) -> list[Arrival]:
        """Returns arrivals for all minutes of the replay at this rate, lengths as they are.

        Raises:
            ConfigError: The trace has too few requests.
        """
        duration_s = self._config.duration_s
        if self._trace is None:
            return generated_arrivals(
                rate_per_s=rate_per_s, duration_s=duration_s, seed=self._config.seed, shape=self._config.shape
            )
        return opening(self._trace, rate_per_s=rate_per_s, duration_s=duration_s)

    def arrivals(self, rate_per_s: float) -> list[Arrival]:
        """Returns the same with lengths that the model can serve.

        Raises:
            ConfigError: As `unfitted`.
        """
        return fitted(self.unfitted(rate_per_s), self._config)

    def described(self, rate_per_s: float) -> dict[str, Any]:
        """Returns what is replayed and what was done to it, for the report."""
        config = self._config
        original = self.unfitted(rate_per_s)
        sized = fitted(original, config, clip=False)
        final = fitted(original, config)
        return {
            "arrivals": f"generated, shape {config.shape}" if config.trace is None else config.trace.name,
            "trace_rate_per_s": None if self._trace is None else round(self.trace_rate_per_s, 3),
            "rate_per_s": round(rate_per_s, 3),
            "requests": len(final),
            **{name: getattr(config, name) for name in DESCRIBED},
            "prompts_clipped": sum(each.num_prompt_tokens > config.max_prompt_tokens for each in sized),
            "outputs_clipped": sum(each.num_output_tokens > config.max_output_tokens for each in sized),
            "prompt_tokens_in_trace": _quantiles([each.num_prompt_tokens for each in original]),
            "prompt_tokens": _quantiles([each.num_prompt_tokens for each in final]),
            "output_tokens_in_trace": _quantiles([each.num_output_tokens for each in original]),
            "output_tokens": _quantiles([each.num_output_tokens for each in final]),
        }


def fitted(arrivals: Sequence[Arrival], config: LoadConfig, *, clip: bool = True) -> list[Arrival]:
    """Returns arrivals with lengths scaled as configured, for models smaller than a trace's, and clipped."""
    most = (config.max_prompt_tokens, config.max_output_tokens) if clip else (sys.maxsize, sys.maxsize)
    return [
        replace(
            each,
            num_prompt_tokens=min(most[0], max(1, round(each.num_prompt_tokens * config.prompt_scale))),
            num_output_tokens=min(most[1], max(1, round(each.num_output_tokens * config.output_scale))),
        )
        for each in arrivals
    ]


def requests_of(arrivals: Sequence[Arrival], prompts: Prompts, config: LoadConfig) -> list[Ask]:
    """Returns the requests of arrivals; prompt and seed of each are its number's, and no other configured seed's."""
    first = config.seed * 1_000_003
    return [
        Ask(
            index=index,
            due_s=each.at_s,
            prompt=prompts(first + index, each.num_prompt_tokens),
            max_tokens=each.num_output_tokens,
            temperature=config.temperature,
            seed=first + index,
        )
        for index, each in enumerate(arrivals)
    ]


def windows_of(requests: Sequence[Ask], duration_s: float, window_s: float) -> list[list[Ask]]:
    """Cuts a replay into equal stretches of at most `window_s`; due times start anew in each."""
    count = max(1, -int(-duration_s // window_s))
    length_s = duration_s / count
    windows: list[list[Ask]] = [[] for _ in range(count)]
    for each in requests:
        number = min(count - 1, int(each.due_s // length_s))
        windows[number].append(replace(each, due_s=each.due_s - number * length_s))
    return windows


def _quantiles(values: Sequence[int]) -> dict[str, int]:
    if not values:
        return {}
    return {name: int(np.quantile(values, at)) for name, at in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
