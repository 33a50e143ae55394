"""A model that can be asked for: what the gateway knows of it beside its verifiers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.messages import ModelIdentity
from paceline.gateway.fleet.generation_config import NO_DEFAULTS, ModelDefaults
from paceline.gateway.message.form import NO_FAMILIES, Families
from paceline.gateway.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that can be asked for.

    Attributes:
        identity: What its verifiers say of it.
        codec: Its tokenizer.
        defaults: Its own, of sampling.
        families: How it writes calls and reasoning.
        trusts_templates: Whether requests may bring chat templates of their own.
        asked_name: The one of its names that it was asked for by; empty: the verifiers' own.
    """

    identity: ModelIdentity
    codec: TextCodec
    defaults: ModelDefaults = NO_DEFAULTS
    families: Families = NO_FAMILIES
    trusts_templates: bool = False
    asked_name: str = ""

    @property
    def shown_name(self) -> str:
        """What answers call it."""
        return self.asked_name or self.identity.name

    @property
    def context_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.identity.context_len
