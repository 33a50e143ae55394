"""A session to run, as either door makes it of a request, and the limits that this product sets to it.

Pure: it knows neither JSON nor protobuf.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.grammar import FIELD as GRAMMAR_FIELD
from paceline.core.messages import FinishReason, ModelIdentity
from paceline.core.params import COUPLED, SessionParams, utf8_len
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.message.form import MessageForm
from paceline.obs.tracing import INVALID_SPAN, Span
from paceline.store.base import EPOCHS_PER_OWNER

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORD_CHARACTERS = 64
MAX_CHOICES = 128
MAX_TEMPLATE_CHARACTERS = 100_000
# Log probabilities of a request that are held until the answer is sent; each is a hundred bytes here and in the answer.
MAX_LOGPROBS = 500_000
SALT_CHARS = 32
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest(SessionParams):
    """A session to run, all fields checked; its salt is as the client names it, see `of_caller`.

    Attributes:
        include_stop_str_in_output: Whether the stop string or stop token that ends the text is part of it.
        skip_special_tokens: Whether special tokens have no text; a stop token never has any unless it is asked for.
        api_key: Name of the API key it came with, never the key; empty where none are asked for.
        max_wait_s: Longest expected wait for a place, in seconds; None: any.
        weights_hash: Weights hash of the verifier it began on; empty: any.
        epoch: First ownership number that this gateway may use.
        committed_token_ids: Generated tokens that an earlier owner has logged.
        offset: Generated tokens that the client has already.
        digest: Their digest; see `paceline.core.messages`.
        arithmetic: Arithmetic of the verifiers that computed its tokens; see `paceline.store.base.SessionRecord`.
        engine_deaths: Engines that died of it, one after another; see `paceline.gateway.sessions.recorded`.
        token_origins: Whether to say how each token came about.
        echo: The prompt, with which the answer's text begins; None: the answer has no prompt in it.
        prompt_only: Nothing generated is wanted. A session still ends with one token, which stays here.
        return_token_ids: Whether the answer names the tokens of prompt and text.
        whole: The client gets the text in one piece.
        finished: Why the session ended, if all of its tokens are logged; nothing is left to run then.
        traceparent: Trace context of the recorded request that it began with, if another call has it now.
        form: How its text becomes a message; None: as it is.
        grammar_field: The field of the request that asks for its grammar, for refusals of the verifier.
        span: The request span.
    """

    model: ServedModel
    session_id: str
    prompt_token_ids: tuple[int, ...]
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
    token_origins: bool = False
    echo: str | None = None
    prompt_only: bool = False
    return_token_ids: bool = False
    whole: bool = False
    finished: FinishReason | None = None
    traceparent: str = ""
    form: MessageForm | None = None
    grammar_field: str = GRAMMAR_FIELD
    span: Span = field(default=INVALID_SPAN, compare=False)

    @property
    def num_resumptions(self) -> int:
        """How many calls, maybe at other gateways, took it over from another one."""
        return self.epoch // EPOCHS_PER_OWNER

    @property
    def resumed(self) -> bool:
        """Whether another call, maybe at another gateway, had it before."""
        return self.num_resumptions > 0

    @property
    def resumable(self) -> bool:
        """Whether another call can continue it: everything that is sent to the client is logged."""
        sampling = self.sampling
        return sampling.logprobs is None and sampling.prompt_logprobs is None and not self.token_origins

    @property
    def may_stop_early(self) -> bool:
        """Whether its text can end it: by a stop string, or after the only call that it may have."""
        return bool(self.stops) or (self.form is not None and not self.form.parallel)

    @property
    def prefix_salt(self) -> str:
        """Salt that keeps its cached prefixes apart from those of other keys and salts; empty: none."""
        if not self.api_key and not self.cache_salt:
            return ""
        return _digest(f"{self.api_key}\0{self.cache_salt}")

    def of_caller(self) -> dict[str, Any]:
        """Returns its parameters as verifiers get them: with digests of whose they are."""
        tenant = _digest(self.api_key) if self.api_key else ""
        return self.params() | {"cache_salt": self.prefix_salt, "tenant": tenant}

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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SALT_CHARS]


def check_logprobs(num_entries: int, *, field: str) -> None:
    """Refuses log probabilities that would fill the memory: they are held until all of them are there.

    Args:
        num_entries: Entries of all prompts and samples, the alternatives included.
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: There would be too many.
    """
    if num_entries > MAX_LOGPROBS:
        raise InvalidRequestError(
            field, f"asks for {num_entries} log probabilities, at most {MAX_LOGPROBS} can be answered at once"
        )
