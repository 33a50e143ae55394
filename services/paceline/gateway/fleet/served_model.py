"""A model that can be asked for: its tokenizer, its defaults, and the limits that it sets to prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import ModelIdentity
from paceline.core.params import check_token_ids
from paceline.gateway.fleet.generation_config import NO_DEFAULTS, ModelDefaults
from paceline.gateway.message.form import NO_FAMILIES, Families
from paceline.gateway.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that can be asked for.

    Attributes:
        identity: As its verifiers announce it.
        codec: Its tokenizer.
        defaults: Its own, of sampling.
        families: How it writes calls and reasoning.
        trusts_templates: Whether requests may bring chat templates of their own.
        asked_name: The one of its names that the request used; empty: the verifiers' own.
    """

    identity: ModelIdentity
    codec: TextCodec
    defaults: ModelDefaults = NO_DEFAULTS
    families: Families = NO_FAMILIES
    trusts_templates: bool = False
    asked_name: str = ""

    @property
    def shown_name(self) -> str:
        """Its name in answers."""
        return self.asked_name or self.identity.name

    @property
    def context_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.identity.context_len

    def prompt_tokens(
        self, given: str | Sequence[int], *, field: str, keep_last: int | None = None, special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Returns the tokens of a prompt that leaves room for at least one more, or its last tokens.

        Raises:
            InvalidRequestError: It is empty, too long for the context, no Unicode text, or has tokens outside the
                vocabulary.
        """
        if isinstance(given, str):
            if not given:
                raise InvalidRequestError(field, "must not be empty")
            given = self.codec.encode(
                given, field=field, special_tokens=special_tokens, context_len=self.context_len, keep_last=keep_last
            )
        if not given:
            raise InvalidRequestError(field, "must hold at least one token")
        if keep_last is not None:
            given = given[-keep_last:]
        if len(given) >= self.context_len:
            raise InvalidRequestError(
                field, f"has {len(given)} tokens, the context of {self.context_len} tokens leaves no room for output"
            )
        # Only now, as a list of millions takes long to copy.
        token_ids = tuple(given)
        check_token_ids(field, token_ids, self.identity.vocab_size)
        return token_ids

    def prompt_limit(self, truncate_to: int | None, max_tokens: int | None) -> int | None:
        """Returns how many of the last tokens of a prompt are used; None: all of them.

        Args:
            truncate_to: `truncate_prompt_tokens`; -1: as many as fit into the context beside the output.
            max_tokens: Most output tokens; None: room for one is enough.

        Raises:
            InvalidRequestError: The context has no room for that many.
        """
        if truncate_to is None:
            return None
        if truncate_to == -1:
            return max(1, self.context_len - (max_tokens or 1))
        if not 1 <= truncate_to < self.context_len:
            raise InvalidRequestError(
                "truncate_prompt_tokens",
                f"must be -1, or from 1 to {self.context_len - 1}, one less than the context, got {truncate_to}",
            )
        return truncate_to

    def output_limit(self, prompt_len: int, max_tokens: int | None, *, default: int | None, field: str) -> int:
        """Returns how many tokens to generate at most.

        Args:
            prompt_len: Tokens of the prompt.
            max_tokens: The request's limit; None: it has none.
            default: Used then, as far as the context reaches; None: all of the context.
            field: Name of the request field, for the error.

        Raises:
            InvalidRequestError: The limit is below one, or prompt and output together exceed the context.
        """
        room = self.context_len - prompt_len
        if max_tokens is None:
            return room if default is None else min(default, room)
        if max_tokens < 1:
            raise InvalidRequestError(field, f"must be at least 1, got {max_tokens}")
        if max_tokens > room:
            raise InvalidRequestError(
                field,
                f"prompt of {prompt_len} tokens plus {max_tokens} is {prompt_len + max_tokens}, "
                f"the context holds {self.context_len} tokens",
            )
        return max_tokens
