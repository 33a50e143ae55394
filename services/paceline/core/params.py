"""Request parameters: sampling and speculation, validated on construction.

`SAMPLING` and `SESSION` are the tables of parameters. The doors of the gateway, the wire, session records and vLLM's
engine read them, so that a new number stands here, in the protos, and where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.core.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_PRIORITY = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 512
MAX_GRAMMAR_CHARS = 131_072
# Length limit of a prefix cache salt, and of a tenant's digest.
MAX_SALT_CHARS = 128
MAX_DRAFT_TOKENS = 64
# Characters of a wrong name that an error repeats.
MAX_SHOWN = 64
# Ways to draft: in the drafter tier a model of its own, or a head on the target's hidden states; inside the verifier
# look-up in the session's own text, what a grammar leaves no choice of, heads on the target's hidden states, and some
# of the target's own layers. Sources inside the verifier stand by cost, as modules and classes of `paceline.drafting`.
DRAFT_MODEL, EAGLE3, NGRAM = "draft_model", "eagle3", "ngram"
GRAMMAR, MEDUSA, LAYER_SKIP = "grammar", "medusa", "layer_skip"
TIER_METHODS = (DRAFT_MODEL, EAGLE3)
SOURCES = {
    NGRAM: "model_free:NgramSource",
    GRAMMAR: "model_free:GrammarSource",
    MEDUSA: "medusa:MedusaSource",
    LAYER_SKIP: "early_exit:EarlyExitSource",
}
METHODS = (*TIER_METHODS, *SOURCES)
# Acceptance rules: which draft tokens become committed tokens. A text has the target's distribution.
COUPLED, REJECTION = "coupled", "rejection"
ACCEPTANCE_RULES = (COUPLED, REJECTION)


def _require(field: str, ok: bool, problem: str) -> None:
    if not ok:
        raise InvalidRequestError(field, problem)


def _require_range(field: str, value: float, low: float, high: float) -> None:
    # NaN compares as outside; a whole number of hundreds of digits, which no float holds, compares exactly.
    _require(field, low <= value <= high, f"must be a number from {low} to {high}, got {value!r}")


def utf8_len(field: str, text: str) -> int:
    """Returns the bytes of a text in UTF-8.

    Raises:
        InvalidRequestError: It has no such form, because it holds half of a surrogate pair.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            field, f"is not Unicode text: half of a surrogate pair at character {error.start}"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A row of a table of parameters.

    Attributes:
        default: The value that changes nothing; None: there is none, or the parameter asks for nothing.
        low: Least number.
        high: Highest number.
        above: Number that it must exceed.
        most: Most entries, or characters.
        own: Whether a model may have a default of its own.
        vllm: Name in vLLM's `SamplingParams`, if another; empty: vLLM's engine does not serve it.
    """

    default: Any = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    most: int | None = None
    own: bool = False
    vllm: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuses a value outside the limits; of a list, by its length alone.

        Raises:
            InvalidRequestError: Names the field and the limit.
        """
        if value is None:
            return
        if isinstance(value, str):
            utf8_len(name, value)
        if self.most is not None:
            kind = "characters" if isinstance(value, str) else "entries"
            _require(name, len(value) <= self.most, f"has {len(value)} {kind}, at most {self.most} are allowed")
        if self.low is not None and self.high is not None:
            _require_range(name, value, self.low, self.high)
        elif self.low is not None:
            _require(name, value >= self.low, f"must be at least {self.low}, got {value!r}")
        if self.above is not None:
            _require(name, value > self.above, f"must be above {self.above}, got {value!r}")


def _row(default: Any = None, **row: Any) -> Any:
    return field(default=default, metadata={"row": Parameter(default=default, **row)})


def _rows(kind: type) -> Mapping[str, Parameter]:
    return {each.name: each.metadata["row"] for each in fields(kind) if each.metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's logits become tokens; the same seed gives the same tokens.

    No token but those of `allowed_token_ids` is chosen, if there are any; an end token has to be one of them, too.
    No output holds the tokens of a bad word one after another. The text follows the `grammar` (llguidance's own JSON,
    or Lark; empty: none): it ends only where that may end, and for sure where that has ended, whatever `min_tokens`.

    Raises:
        InvalidRequestError: A field is outside its limits; the error names field and limit.
    """

    max_tokens: int = field(metadata={"row": Parameter(low=1)})
    temperature: float = _row(1.0, low=0, high=100, own=True)
    top_p: float = _row(1.0, above=0, low=0, high=1, own=True)
    top_k: int = _row(0, low=0, own=True)
    min_p: float = _row(0.0, low=0, high=1, own=True)
    repetition_penalty: float = _row(1.0, low=0.01, high=100, own=True)
    presence_penalty: float = _row(0.0, low=-2, high=2)
    frequency_penalty: float = _row(0.0, low=-2, high=2)
    logit_bias: tuple[tuple[int, float], ...] = _row((), most=1024)
    min_tokens: int = _row(0, low=0)
    stop_token_ids: tuple[int, ...] = _row((), most=64)
    allowed_token_ids: tuple[int, ...] = _row((), most=4096)
    # Each of the words is written in two ways, with a space before it and without.
    bad_words: tuple[tuple[int, ...], ...] = _row((), most=2 * MAX_BAD_WORDS, vllm="_bad_words_token_ids")
    grammar: str = _row("", most=MAX_GRAMMAR_CHARS, vllm="")
    ignore_eos: bool = _row(False)
    logprobs: int | None = _row(None, low=0, high=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = _row(None, low=0, high=MAX_TOP_LOGPROBS, vllm="")
    seed: int = _row(0, low=0, high=MAX_SEED)

    def __post_init__(self) -> None:
        """Checks every field that needs no knowledge of the model."""
        for name, row in SAMPLING.items():
            row.check(name, getattr(self, name))
        for token_id, bias in self.logit_bias:
            _require_range(f"logit_bias[{token_id}]", bias, -100, 100)
        for index, word in enumerate(self.bad_words):
            check_bad_word(index, len(word))
        _require(
            "min_tokens",
            self.min_tokens <= self.max_tokens,
            f"must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
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
    """A request's speculation parameters.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParams:
    """Parameters of a session wherever it runs: gateways, verifiers, drafters and records carry all of them.

    Cached pages are shared only under the same `cache_salt`. Sessions of lower `priority` come first among those of
    their `tenant`, a digest of whose they are.

    Raises:
        InvalidRequestError: A field is outside its limits; the error names field and limit.
    """

    sampling: SamplingParams
    speculation: SpeculationParams = SpeculationParams()
    cache_salt: str = _row("", most=MAX_SALT_CHARS)
    priority: int = _row(0, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    tenant: str = _row("", most=MAX_SALT_CHARS)

    def __post_init__(self) -> None:
        """Checks the fields that are no messages of their own."""
        for name, row in SESSION.items():
            row.check(name, getattr(self, name))

    def params(self) -> dict[str, Any]:
        """Returns the fields of this class alone, for another message of the same session."""
        return {each: getattr(self, each) for each in SessionParams.__slots__}


SAMPLING = _rows(SamplingParams)
SESSION = _rows(SessionParams)


def check_bad_word(index: int, num_tokens: int) -> None:
    """Refuses a bad word that is too long, or empty.

    Raises:
        InvalidRequestError: Names it.
    """
    most = MAX_BAD_WORD_TOKENS
    _require(f"bad_words[{index}]", 1 <= num_tokens <= most, f"must have 1 to {most} tokens, got {num_tokens}")


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
