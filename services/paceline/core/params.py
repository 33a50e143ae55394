"""What a request asks for: sampling and speculation, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_PRIORITY = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 4096
# Each of the words is written in two ways, with a space before it and without.
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 512
MAX_GRAMMAR_CHARS = 131_072
MAX_DRAFT_TOKENS = 64
# Characters of a wrong name that an error repeats.
MAX_SHOWN = 64
# Ways to draft: in the drafter tier a model of its own, or a head on the target's hidden states; inside the verifier
# look-up in the session's own text, what a grammar leaves no choice of, heads on the target's hidden states, and some
# of the target's own layers.
DRAFT_MODEL, EAGLE3, NGRAM = "draft_model", "eagle3", "ngram"
GRAMMAR, MEDUSA, LAYER_SKIP = "grammar", "medusa", "layer_skip"
TIER_METHODS = (DRAFT_MODEL, EAGLE3)
METHODS = (*TIER_METHODS, NGRAM, GRAMMAR, MEDUSA, LAYER_SKIP)
# Acceptance rules: which draft tokens become committed tokens. A text has the target's distribution.
COUPLED, REJECTION = "coupled", "rejection"
ACCEPTANCE_RULES = (COUPLED, REJECTION)


# Entries of the fields that hold several.
MAX_ENTRIES: Mapping[str, int] = {
    "logit_bias": MAX_LOGIT_BIAS_ENTRIES,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": 2 * MAX_BAD_WORDS,
}


def _require(field: str, ok: bool, problem: str) -> None:
    if not ok:
        raise InvalidRequestError(field, problem)


def _require_range(field: str, value: float, low: float, high: float) -> None:
    # NaN compares as outside; a whole number of hundreds of digits, which no float holds, compares exactly.
    _require(field, low <= value <= high, f"must be a number from {low:g} to {high:g}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's logits become tokens; the same seed gives the same tokens.

    No token but those of `allowed_token_ids` is chosen, if there are any; an end token has to be one of them, too.
    No output holds the tokens of a bad word one after another. The text follows the `grammar` (llguidance's own JSON,
    or Lark; empty: none): it ends only where that may end, and for sure where that has ended, whatever `min_tokens`.

    Raises:
        InvalidRequestError: A field is outside its limits; the error names field and limit.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every field that needs no knowledge of the model."""
        _require("max_tokens", self.max_tokens >= 1, f"must be at least 1, got {self.max_tokens}")
        _require_range("temperature", self.temperature, 0.0, 100.0)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require("top_p", self.top_p > 0.0, f"must be above 0, got {self.top_p!r}")
        _require("top_k", self.top_k >= 0, f"must be 0 (off) or more, got {self.top_k}")
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_lists()
        _require(
            "min_tokens",
            0 <= self.min_tokens <= self.max_tokens,
            f"must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _require("seed", 0 <= self.seed <= MAX_SEED, f"must be from 0 to 2**64-1, got {self.seed}")
        for field, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _require_range(field, count, 0, MAX_TOP_LOGPROBS)

    def _check_lists(self) -> None:
        check_counts(self)
        for token_id, bias in self.logit_bias:
            _require_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        for index, word in enumerate(self.bad_words):
            check_bad_word(index, len(word))
        length = len(self.grammar)
        _require(
            "grammar", length <= MAX_GRAMMAR_CHARS, f"must have at most {MAX_GRAMMAR_CHARS} characters, got {length}"
        )

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Checks the fields that name tokens.

        Raises:
            InvalidRequestError: A token id lies outside the vocabulary, or there may be no token left to choose.
        """
        check_token_ids("logit_bias", [token_id for token_id, _ in self.logit_bias], vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for index, word in enumerate(self.bad_words):
            check_token_ids(f"bad_words[{index}]", word, vocab_size)
        at_first = (*self.stop_token_ids, *eos_token_ids) if self.min_tokens else ()
        barred = {*at_first, *(word[-1] for word in self.bad_words)}
        some_left = set(self.allowed_token_ids) - barred if self.allowed_token_ids else len(barred) < vocab_size
        _require(
            "allowed_token_ids" if self.allowed_token_ids else "bad_words",
            bool(some_left),
            "leave no token to choose: each may be barred by bad_words or min_tokens",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """What one request asks of speculation.

    `acceptance` "" is the verifier's default. Under "coupled" nothing of this changes the tokens, under "rejection"
    nothing changes their distribution. Which names are served, a verifier says. Of what the client predicts of the
    output, `MAX_PREDICTED_TOKENS` are looked at.

    Raises:
        InvalidRequestError: A field is outside its limits.
    """

    enabled: bool = True
    max_draft_tokens: int | None = None
    acceptance: str = ""
    method: str = ""
    predicted_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_draft_tokens is not None:
            _require_range("speculation.max_draft_tokens", self.max_draft_tokens, 0, MAX_DRAFT_TOKENS)
        _require(
            "speculation.acceptance",
            self.acceptance in ("", *ACCEPTANCE_RULES),
            f"must be one of {', '.join(ACCEPTANCE_RULES)}, got {self.acceptance[:MAX_SHOWN]!r}",
        )
        # A method named twice is worth nothing, so there are no more of them.
        names = self.method.split("+", len(METHODS) - 1) if self.method else []
        _require(
            "speculation.method",
            set(names) <= set(METHODS),
            f"must be some of {', '.join(METHODS)}, joined by +, got {self.method[:MAX_SHOWN]!r}",
        )

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.method.split("+")) if self.method else ()

    @property
    def cap(self) -> int:
        """Most draft tokens verified in one step."""
        if not self.enabled:
            return 0
        return MAX_DRAFT_TOKENS if self.max_draft_tokens is None else self.max_draft_tokens


def check_counts(params: Any) -> None:
    """Refuses sampling parameters, ours or a peer's message, with more entries than are allowed.

    Raises:
        InvalidRequestError: Names the field.
    """
    for field, most in MAX_ENTRIES.items():
        count = len(getattr(params, field))
        _require(field, count <= most, f"has {count} entries, at most {most} are allowed")


def check_bad_word(index: int, num_tokens: int) -> None:
    """Refuses a bad word that is too long, or empty.

    Raises:
        InvalidRequestError: Names it.
    """
    most = MAX_BAD_WORD_TOKENS
    _require(f"bad_words[{index}]", 1 <= num_tokens <= most, f"must have 1 to {most} tokens, got {num_tokens}")


def check_priority(priority: int) -> None:
    """Refuses a priority that does not fit into 32 bits.

    Raises:
        InvalidRequestError: It does not.
    """
    _require(
        "priority",
        -MAX_PRIORITY <= priority <= MAX_PRIORITY,
        f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}",
    )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary.

    Raises:
        InvalidRequestError: Names the first offending index.
    """
    # A loop over a long prompt would take ten times as long.
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field}[{index}]", f"token id {token_id} is outside the vocabulary of {vocab_size}"
            )
