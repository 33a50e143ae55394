"""When requests arrive and how long they are: read from public traces, or generated with their statistics.

Knows nothing of serving. Traces carry no text: a replay has to bring prompts of these lengths.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError

Floats = npt.NDArray[np.float64]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
# Azure writes 100 ns digits; datetime reads microseconds.
_TIMESTAMP_CHARS = 26
# Gaps drawn at a time.
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds after the first one of its trace, and its lengths."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Statistics of a service's arrivals; two of them are fitted to Azure's published hours of November 2023.

    Gaps are exponential with one of several means (a hyperexponential distribution, by expectation maximisation), in
    units of the mean gap. Lengths are quantile tables; those of prompt and answer have nothing to do
    with one another (the traces' rank correlations are 0.08 and -0.02).

    Attributes:
        gap_weights: Chance of each kind of gap; they sum to 1.
        gap_means: Mean of each kind over the mean of all.
        prompt_quantiles: Tokens at `QUANTILES`.
        output_quantiles: The same of answers.
    """

    gap_weights: tuple[float, ...]
    gap_means: tuple[float, ...]
    prompt_quantiles: tuple[int, ...]
    output_quantiles: tuple[int, ...]


QUANTILES = (0.0, 0.01, 0.025, *(step / 20 for step in range(1, 20)), 0.975, 0.99, 0.999, 1.0)
# fmt: off
SHAPES: Mapping[str, Shape] = {
    # 19,366 requests in 3,502 s. Nearly Poisson but for 1.75 % that follow at once.
    "conversation": Shape(
        gap_weights=(0.0175, 0.9825),
        gap_means=(0.0056, 1.0178),
        prompt_quantiles=(2, 29, 120, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189,
                          1315, 1876, 2734, 4083, 4092, 4142, 6179, 14050),
        output_quantiles=(7, 16, 28, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395,
                          400, 411, 424, 451, 522, 601, 954, 1000),
    ),
    # 8,819 requests in 3,436 s: bursts of hundreds between silences of minutes.
    "code": Shape(
        gap_weights=(0.338, 0.6343, 0.0209, 0.0068),
        gap_means=(0.004, 0.3439, 3.1387, 104.9),
        prompt_quantiles=(3, 17, 44, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2744,
                          3192, 3920, 5188, 7303, 7435, 7436, 7437, 7437),
        output_quantiles=(6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24,
                          29, 39, 55, 90, 145, 251, 825, 1899),
    ),
}
# fmt: on


def read_arrivals(path: Path) -> list[Arrival]:
    """Reads a trace, plain or gzipped: Azure's CSV of 2023 or Mooncake's JSON lines.

    Returns:
        Its requests in order of time, the first at 0 s.

    Raises:
        ConfigError: The file cannot be read, or a line is in neither form; names file and line.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            first = next(lines, "")
            rows = _mooncake if first.startswith("{") else _azure
            arrivals = list(rows(chain([first], lines), path.name))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None
    if not arrivals:
        raise ConfigError(f"the trace {path} holds no requests")
    arrivals.sort(key=lambda each: each.at_s)
    first_s = arrivals[0].at_s
    return [replace(each, at_s=each.at_s - first_s) for each in arrivals]


def _azure(lines: Iterator[str], name: str) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    if tuple(rows.fieldnames or ()) != AZURE_COLUMNS:
        raise ConfigError(
            f"{name}, line 1: must be Azure's columns {','.join(AZURE_COLUMNS)} or a JSON object with "
            f"{', '.join(MOONCAKE_KEYS)}, got {','.join(rows.fieldnames or ())!r:.80}"
        )
    time, prompt, output = AZURE_COLUMNS
    for row in rows:
        try:
            at_s = datetime.fromisoformat(row[time][:_TIMESTAMP_CHARS]).timestamp()
            arrival = _arrival(at_s, int(row[prompt]), int(row[output]))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}, line {rows.line_num}: {error}") from None
        yield arrival


def _mooncake(lines: Iterator[str], name: str) -> Iterator[Arrival]:
    time, prompt, output = MOONCAKE_KEYS
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            arrival = _arrival(float(row[time]) / 1000.0, int(row[prompt]), int(row[output]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}, line {number}: needs {', '.join(MOONCAKE_KEYS)} ({error!r})") from None
        yield arrival


def _arrival(at_s: float, num_prompt_tokens: int, num_output_tokens: int) -> Arrival:
    if not math.isfinite(at_s) or num_prompt_tokens < 1 or num_output_tokens < 1:
        raise ValueError(
            "needs a time, and at least 1 token of prompt and of output, "
            f"got {at_s:g} s, {num_prompt_tokens} and {num_output_tokens}"
        )
    return Arrival(at_s, num_prompt_tokens, num_output_tokens)


def generated_arrivals(
    *, rate_per_s: float, duration_s: float, seed: int, shape: str = "conversation"
) -> list[Arrival]:
    """Returns a trace with the statistics of a shape; the same arguments give the same trace.

    Args:
        rate_per_s: Requests a second, on average over the duration.
        duration_s: Seconds from 0 within which all requests arrive.
        seed: Seed of all random choices.
        shape: A name in `SHAPES`.

    Raises:
        ConfigError: There is no such shape, or rate or duration are not above 0.
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if not (rate_per_s > 0.0 and duration_s > 0.0):
        raise ConfigError(f"rate and duration must be above 0, got {rate_per_s:g}/s and {duration_s:g} s")
    of = SHAPES[shape]
    rng = np.random.default_rng(seed)
    times_s = _times(of, rate_per_s, duration_s, rng)
    lengths = _lengths(of, len(times_s), rng)
    return [
        Arrival(float(at_s), int(prompt), int(output)) for at_s, (prompt, output) in zip(times_s, lengths, strict=True)
    ]


def _times(shape: Shape, rate_per_s: float, duration_s: float, rng: np.random.Generator) -> Floats:
    """Returns arrival times, `[requests]`."""
    total = rate_per_s * duration_s
    ticks = np.empty(0)
    while not len(ticks) or ticks[-1] < total:
        gaps = rng.exponential(rng.choice(shape.gap_means, _CHUNK, p=shape.gap_weights))
        ticks = np.concatenate((ticks, np.cumsum(gaps) + (ticks[-1] if len(ticks) else 0.0)))
    times_s: Floats = ticks[ticks < total] / rate_per_s
    return times_s


def _lengths(shape: Shape, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns tokens of prompt and output, `[count, 2]`."""
    tables = (shape.prompt_quantiles, shape.output_quantiles)
    columns = [np.interp(rng.random(count), QUANTILES, table) for table in tables]
    lengths: npt.NDArray[np.int64] = np.rint(np.stack(columns, axis=1)).astype(np.int64)
    return lengths


def opening(arrivals: Sequence[Arrival], *, rate_per_s: float | None, duration_s: float) -> list[Arrival]:
    """Returns the first requests of a trace.

    Args:
        rate_per_s: As many as come in the duration at this rate, the clock stretched to fit them; None: those that come
            in it.

    Raises:
        ConfigError: The trace has too few requests for that.
    """
    if rate_per_s is None:
        return list(takewhile(lambda each: each.at_s < duration_s, arrivals))
    count = max(1, round(rate_per_s * duration_s))
    if count >= len(arrivals) or arrivals[count].at_s <= arrivals[0].at_s:
        raise ConfigError(
            f"{duration_s:g} s at {rate_per_s:g} requests/s are {count} requests and one after them, the trace has "
            f"{len(arrivals)}"
        )
    first_s = arrivals[0].at_s
    stretch = duration_s / (arrivals[count].at_s - first_s)
    return [replace(each, at_s=(each.at_s - first_s) * stretch) for each in arrivals[:count]]
