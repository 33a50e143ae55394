"""Turns a request into vLLM's sampling parameters; what vLLM does differently is refused by name, never dropped.

It knows the names in vLLM's `SamplingParams` and imports nothing of it. Raw log probabilities, the order of processors
and their meaning are the same in both engines (`paceline.core.processors`).
"""

from __future__ import annotations

import hashlib
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import GenerateRequest
from paceline.core.params import REJECTION, SAMPLING, SamplingParams
from paceline.core.processors import GREEDY_BELOW
from paceline.vllm.settings import extra_args_of

# vLLM raises lower temperatures to the first and refuses those above the second.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
_SEED_BYTES = 8


def check_under_vllm(request: GenerateRequest) -> None:
    """Refuses what vLLM would not compute as requested.

    Raises:
        InvalidRequestError: Names the field and the reason.
    """
    sampling = request.sampling
    if not (_greedy(sampling) or LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE):
        raise InvalidRequestError(
            "temperature",
            f"must be 0, or from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, which are vLLM's limits, "
            f"got {sampling.temperature:g}",
        )
    rule = request.speculation.acceptance
    if rule not in ("", REJECTION):
        raise InvalidRequestError("speculation.acceptance", f"{rule} is not served under vLLM, only {REJECTION}")
    for name, row in SAMPLING.items():
        if row.vllm == "" and getattr(sampling, name) != row.default:
            raise InvalidRequestError(name, "is not served under vLLM, only by Paceline's engine")
    if request.priority:
        raise InvalidRequestError("priority", "is not served under vLLM, which takes requests as they come")


def vllm_sampling(request: GenerateRequest, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams` by name; those left out have the defaults there.

    Committed tokens are part of vLLM's prompt but count as generated here. All tokens that end a text are named:
    nothing depends on what vLLM finds in the checkpoint.
    """
    sampling = request.sampling
    num_committed = len(request.committed_token_ids)
    greedy = _greedy(sampling)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    rows = {name: row.vllm or name for name, row in SAMPLING.items() if row.vllm != ""}
    return {known: getattr(sampling, name) for name, known in rows.items()} | {
        "max_tokens": sampling.max_tokens - num_committed,
        "min_tokens": max(0, sampling.min_tokens - num_committed),
        "temperature": 0.0 if greedy else sampling.temperature,
        # Argmax needs no generator, and vLLM's steps are slower with one for each row.
        "seed": None if greedy else seed_after(sampling.seed, num_committed),
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "_bad_words_token_ids": list(map(list, sampling.bad_words)) or None,
        "ignore_eos": True,
        "stop_token_ids": sorted(ends),
        # Barred until `min_tokens`.
        "_all_stop_token_ids": {*sampling.stop_token_ids, *eos_token_ids},
        "detokenize": False,
        "extra_args": extra_args_of(request.speculation),
    }


def counted_anew(request: GenerateRequest) -> bool:
    """Whether tokens generated elsewhere would count, but do not under vLLM: its distribution is then not the target's.

    Presence and frequency penalties and bad words look at generated tokens only, and to vLLM those from elsewhere are
    part of the prompt. The repetition penalty looks at both.
    """
    sampling, committed = request.sampling, request.committed_token_ids
    if not committed:
        return False
    if sampling.presence_penalty or sampling.frequency_penalty:
        return True
    begun = (committed[-num:] == word[:num] for word in sampling.bad_words for num in range(1, len(word)))
    return any(begun)


def seed_after(seed: int, num_committed: int) -> int:
    """The seed with which a session continues after some tokens: it must not draw the same noise again."""
    if not num_committed:
        return seed
    start = f"{seed} {num_committed}".encode()
    return int.from_bytes(hashlib.blake2b(start, digest_size=_SEED_BYTES).digest(), "little")


def _greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < GREEDY_BELOW
