"""What the gateway makes of a request of either front door: sessions, checked against the model's limits.

Pure. It knows the limits of models and of this product, but neither JSON nor protobuf.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import FinishReason, ModelIdentity
from paceline.core.params import COUPLED, MAX_SEED, SamplingParams, SpeculationParams, check_token_ids
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.message.form import MessageForm
from paceline.gateway.text.codec import utf8_len
from paceline.obs.tracing import INVALID_SPAN, Span
from paceline.store.base import EPOCHS_PER_OWNER

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORD_CHARACTERS = 64
MAX_CHOICES = 128
MAX_SALT_CHARACTERS = 128
MAX_TEMPLATE_CHARACTERS = 100_000
# Of one request; each is a hundred bytes here and in the answer.
MAX_PROMPT_LOGPROBS = 500_000
SALT_CHARS = 32
DEFAULT_MAX_TOKENS = 16
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """One session to run, all fields checked.

    Attributes:
        include_stop_str_in_output: Whether the stop string or stop token that ends the text is part of it.
        skip_special_tokens: Whether special tokens have no text; a stop token never has any unless it is asked for.
        api_key: Name of the API key it came with, never the key; empty where none are asked for.
        max_wait_s: Longest expected wait for a place, in seconds; None: any.
        weights_hash: Of the verifier it began on; empty: any.
        epoch: First ownership number that this gateway may use.
        committed_token_ids: Generated tokens that an earlier owner has logged.
        offset: Generated tokens that the client has already.
        digest: Of these; see `paceline.core.token_digest`.
        arithmetic: Of the verifiers that have computed its tokens; see `paceline.store.base.SessionRecord`.
        engine_deaths: Engines that died of it, one after another; see `paceline.gateway.sessions.trail`.
        token_fates: Whether to say how each token came about.
        echo: What the answer's text begins with, the prompt; None: the answer has no prompt in it.
        prompt_only: Nothing generated is wanted. One token is, for that is what a session ends with, and stays here.
        return_token_ids: Whether the answer names the tokens of prompt and text.
        whole: The client gets the text in one piece, and nothing in it can end the session early.
        cache_salt: As the request names it; see `prefix_salt`.
        priority: Lower ones get places at their verifier first.
        finished: Why the session ended, if all of its tokens are logged; nothing is left to run then.
        traceparent: Trace context of the recorded request that it began with, if another call has it now.
        form: How its text becomes a message; None: as it is.
        span: The request span.
    """

    model: ServedModel
    session_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    stops: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    api_key: str = ""
    max_wait_s: float | None = None
    weights_hash: str = ""
    epoch: int = 1
    committed_token_ids: tuple[int, ...] = ()
    offset: int = 0
    digest: str = ""
    arithmetic: str = ""
    engine_deaths: int = 0
    cache_salt: str = ""
    priority: int = 0
    token_fates: bool = False
    echo: str | None = None
    prompt_only: bool = False
    return_token_ids: bool = False
    whole: bool = False
    finished: FinishReason | None = None
    traceparent: str = ""
    form: MessageForm | None = None
    span: Span = field(default=INVALID_SPAN, compare=False)

    @property
    def resumed(self) -> bool:
        """Whether another call, maybe at another gateway, had it before."""
        return self.epoch >= EPOCHS_PER_OWNER

    @property
    def resumable(self) -> bool:
        """Whether another call can go on with it: all that the client is told is logged."""
        sampling = self.sampling
        return sampling.logprobs is None and sampling.prompt_logprobs is None and not self.token_fates

    @property
    def prefix_salt(self) -> str:
        """What keeps its cached prefixes apart from those of other keys, and of other salts; empty: nothing does."""
        if not self.api_key and not self.cache_salt:
            return ""
        return hashlib.sha256(f"{self.api_key}\0{self.cache_salt}".encode()).hexdigest()[:SALT_CHARS]

    @property
    def keeps_tokens(self) -> bool:
        """Whether the same seed promises the same tokens, wherever they are computed."""
        return self.speculation.acceptance in ("", COUPLED)

    def fits(self, identity: ModelIdentity) -> bool:
        """Whether a verifier serves such a session: its length, its ways to draft, its rule."""
        speculation = self.speculation
        return (
            len(self.prompt_token_ids) + self.sampling.max_tokens <= identity.context_len
            and (not identity.methods or set(speculation.methods) <= set(identity.methods))
            and (not identity.acceptance_rules or speculation.acceptance in ("", *identity.acceptance_rules))
        )

    def resolved(self) -> SessionRequest:
        """Returns the same with the acceptance rule named: it must not change with the verifier."""
        rules = self.model.identity.acceptance_rules
        if self.speculation.acceptance or not rules:
            return self
        return replace(self, speculation=replace(self.speculation, acceptance=rules[0]))


def new_seed() -> int:
    """Returns a seed for a request that names none."""
    return secrets.randbits(64)


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of the index-th of several samples; that of the first one is the request's own.

    SplitMix64 (Steele, Lea and Flood, 2014) keeps the streams of neighbouring seeds apart.
    """
    if index == 0:
        return seed
    state = (seed + index * _GOLDEN_RATIO_64) & MAX_SEED
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return state ^ (state >> 31)


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings.

    Raises:
        InvalidRequestError: There are too many, or one is empty, too long or not Unicode text.
    """
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"has {len(stops)} entries, at most {MAX_STOP_STRINGS} are allowed")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}"
            )
        utf8_len(f"stop[{index}]", stop)
    return tuple(stops)


def check_salt(salt: str) -> str:
    """Returns the salt of a prefix cache.

    Raises:
        InvalidRequestError: It is too long, or not Unicode text.
    """
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequestError("cache_salt", f"must have at most {MAX_SALT_CHARACTERS} characters, got {len(salt)}")
    utf8_len("cache_salt", salt)
    return salt


def check_judged(num_tokens: int, prompt_logprobs: int, *, field: str) -> None:
    """Refuses log probabilities of prompts that would fill the memory: they are held until all of them are there.

    Args:
        num_tokens: Of all prompts and samples.
        prompt_logprobs: Alternatives asked for at each.
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: There would be too many.
    """
    num_entries = num_tokens * (1 + max(0, prompt_logprobs))
    if num_entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            field, f"asks for {num_entries} log probabilities, at most {MAX_PROMPT_LOGPROBS} are told at once"
        )


def up_to_end(
    committed: tuple[int, ...], sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Returns generated tokens up to the one that ends the text, and why it ends there; None: it goes on.

    Args:
        committed: Generated tokens.
        sampling: Of the session.
        eos_token_ids: Of the model.
    """
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    for index, token_id in enumerate(committed):
        if token_id in ends:
            return committed[: index + 1], FinishReason.STOP
    if len(committed) >= sampling.max_tokens:
        return committed[: sampling.max_tokens], FinishReason.LENGTH
    return committed, None


def bad_word_tokens(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words that are not to be generated: at the begin of a text, and after a space.

    Raises:
        InvalidRequestError: A word is not Unicode text.
    """
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        field, bare = f"bad_words[{index}]", word.lstrip() or word
        for text in (bare, f" {bare}"):
            found[model.codec.encode(text, field=field, special_tokens=False, context_len=model.context_len)] = None
    return tuple(found)


def tokens_kept(model: ServedModel, asked: int | None, wanted: int | None) -> int | None:
    """Returns how many of the last tokens of a prompt are used; None: all of them.

    Args:
        model: Whose context bounds it.
        asked: `truncate_prompt_tokens`; -1: as many as fit into the context beside the output.
        wanted: Most output tokens; None: room for one is enough.

    Raises:
        InvalidRequestError: Others are asked for than the context has room for.
    """
    if asked is None:
        return None
    if asked == -1:
        return max(1, model.context_len - (wanted or 1))
    if not 1 <= asked < model.context_len:
        raise InvalidRequestError(
            "truncate_prompt_tokens",
            f"must be -1, or from 1 to {model.context_len - 1}, one less than the context, got {asked}",
        )
    return asked


def encode_text(model: ServedModel, text: str, *, field: str, keep_last: int | None = None) -> tuple[int, ...]:
    """Returns the tokens of a prompt given as text, or the last of them.

    Raises:
        InvalidRequestError: It is empty, too long for the context, or not Unicode text.
    """
    if not text:
        raise InvalidRequestError(field, "must not be empty")
    token_ids = model.codec.encode(
        text, field=field, special_tokens=True, context_len=model.context_len, keep_last=keep_last
    )
    return check_prompt(model, token_ids, field=field)


def check_prompt(
    model: ServedModel, token_ids: Sequence[int], *, field: str, keep_last: int | None = None
) -> tuple[int, ...]:
    """Returns a prompt that leaves room for at least one token, or its last tokens.

    Raises:
        InvalidRequestError: It is empty, too long for the context, or names tokens outside the vocabulary.
    """
    if not token_ids:
        raise InvalidRequestError(field, "must hold at least one token")
    if keep_last is not None:
        token_ids = token_ids[-keep_last:]
    if len(token_ids) >= model.context_len:
        raise InvalidRequestError(
            field,
            f"has {len(token_ids)} tokens, the context of {model.context_len} tokens leaves no room for output",
        )
    # Only now: a list of millions takes long to copy.
    token_ids = tuple(token_ids)
    check_token_ids(field, token_ids, model.identity.vocab_size)
    return token_ids


def room_for_output(model: ServedModel, prompt_len: int, wanted: int | None, *, unasked: int | None, field: str) -> int:
    """Returns how many tokens to generate at most.

    Args:
        model: Model whose context bounds the sum.
        prompt_len: Tokens of the prompt.
        wanted: What the request says; None: it says nothing.
        unasked: Used then, as far as the context reaches; None: all of that.
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: Less than one is wanted, or prompt and output together exceed the context.
    """
    room = model.context_len - prompt_len
    if wanted is None:
        return room if unasked is None else min(unasked, room)
    if wanted < 1:
        raise InvalidRequestError(field, f"must be at least 1, got {wanted}")
    if wanted > room:
        raise InvalidRequestError(
            field,
            f"prompt of {prompt_len} tokens plus {wanted} is {prompt_len + wanted}, "
            f"the context holds {model.context_len} tokens",
        )
    return wanted
