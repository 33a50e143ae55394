"""The fleet as this gateway knows it: the registry, read in the background.

A dead registry leaves the last known fleet in place. The router decides which verifier gets a session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from paceline.core.errors import ModelNotFoundError, UnavailableError
from paceline.core.messages import DRAFTER, VERIFIER, ModelIdentity
from paceline.gateway.fleet.generation_config import NO_DEFAULTS, ModelDefaults
from paceline.gateway.fleet.routing import able_verifiers
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.fleet.verifier_client import VerifierClient
from paceline.gateway.fleet.verifier_health import VerifierHealth
from paceline.gateway.message.form import AUTO, Families
from paceline.gateway.text.codec import TextCodec
from paceline.store.base import Replica, Store
from paceline.store.registry import Answers, RegistryView, nobody_answers

_log = logging.getLogger(__name__)


class Fleet:
    """Replicas and models that this gateway can use.

    Attributes:
        health: Health of each verifier, from its calls.
    """

    def __init__(
        self,
        registry: Store,
        codecs: Mapping[str, TextCodec],
        answers: Answers = nobody_answers,
        *,
        defaults: Mapping[str, ModelDefaults] | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        aliases: Mapping[str, str] | None = None,
        trusts_templates: bool = False,
        on_ejected: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows no replica until the first `refresh`.

        Args:
            registry: Where replicas announce themselves.
            codecs: Tokenizers by model name; only these models are served.
            answers: Asks a replica that has left the registry, or cannot be reached, whether it still serves.
            defaults: Sampling defaults of models that have some, by name.
            tool_call_parser: How models write calls: a family, `auto` or `none`.
            reasoning_parser: How they write reasoning, likewise.
            aliases: Further names, each with the name of its model.
            trusts_templates: Whether requests may bring chat templates of their own.
            on_ejected: Called with its replica id when a verifier gets no sessions for a while.
            clock: Monotonic seconds.
        """
        self.health = VerifierHealth(clock, on_ejected)
        self._answers = answers
        self._view = RegistryView(registry, answers=answers)
        self._codecs = dict(codecs)
        self._defaults = dict(defaults or {})
        self._families = {
            name: Families.of(tool_call_parser, reasoning_parser, codec.template_source)
            for name, codec in self._codecs.items()
        }
        self._aliases = dict(aliases or {})
        self._trusts_templates = trusts_templates
        self._warned_of: set[str] = set()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The fleet as last read."""
        return self._view.replicas

    @property
    def store_error(self) -> str | None:
        """Why the last reading failed; None if it did not."""
        return self._view.error

    @property
    def own_names(self) -> list[str]:
        """Names of the models, as their verifiers announce them."""
        return sorted(self._codecs)

    @property
    def model_names(self) -> list[str]:
        """Names that can be asked for, with or without a verifier at the moment."""
        return sorted({*self._codecs, *self._aliases})

    def verifiers(self, name: str) -> list[Replica]:
        """Returns the verifiers of a model that take sessions and use this gateway's vocabulary."""
        codec = self._codecs.get(name)
        wanted = "" if codec is None else codec.vocab_hash
        able = able_verifiers(self.replicas, name)
        return [each for each in able if not wanted or (each.identity and each.identity.vocab_hash == wanted)]

    def identity(self, name: str) -> ModelIdentity | None:
        """Returns the identity that the verifier with the longest context announces; None if none is known."""
        name = self._aliases.get(name, name)
        known = [each.identity for each in able_verifiers(self.replicas, name) if each.identity is not None]
        same = [each.identity for each in self.verifiers(name) if each.identity is not None]
        return max(same or known, key=lambda identity: identity.context_len, default=None)

    def model(self, name: str) -> ServedModel:
        """Returns a model by the name users ask for; an empty name means the only one.

        Raises:
            ModelNotFoundError: It is not served here.
            UnavailableError: It has no verifier, or only verifiers with another vocabulary.
        """
        if not name and len(self._codecs) == 1:
            [name] = self._codecs
        asked, name = name, self._aliases.get(name, name)
        codec = self._codecs.get(name)
        if codec is None:
            raise ModelNotFoundError(f"model: {name[:80]!r} is not served here; served: {', '.join(self.model_names)}")
        identity = self.identity(name)
        if identity is None:
            raise UnavailableError(f"no verifier of model {name!r} is available now")
        if codec.vocab_hash and codec.vocab_hash != identity.vocab_hash:
            raise UnavailableError(
                f"model {name!r}: this gateway's tokenizer is not the verifier's; start both with the same folder"
            )
        return ServedModel(
            identity=identity,
            codec=codec,
            defaults=self._defaults.get(name, NO_DEFAULTS),
            families=self._families[name],
            trusts_templates=self._trusts_templates,
            asked_name=asked,
        )

    def addresses(self) -> list[str]:
        """Returns where the verifiers listen."""
        return [replica.address for replica in self.replicas if replica.role == VERIFIER]

    async def refresh(self) -> None:
        """Reads the registry once; a failure leaves the last known fleet in place.

        Verifiers whose calls were lost are asked whether they serve: a gateway that is not ready gets no requests any
        more, which could show that all is well again.
        """
        await self._view.refresh()
        self.health.keep_only(self.replicas)
        suspects = self.health.suspects(self.replicas)
        for replica, serves in zip(suspects, await asyncio.gather(*map(self._answers, suspects)), strict=True):
            if serves:
                self.health.heard(replica.replica_id)
        self._warn_of_useless_drafters()

    def _warn_of_useless_drafters(self) -> None:
        """Names, once each, the drafters that can draft for no verifier: they are never paired."""
        targets = [each.identity for each in self.replicas if each.role == VERIFIER and each.identity is not None]
        useless = {
            each.replica_id
            for each in self.replicas
            if each.role == DRAFTER and targets and not (each.identity and any(map(each.identity.drafts_for, targets)))
        }
        for replica_id in sorted(useless - self._warned_of):
            _log.warning(
                "a drafter speaks the vocabulary of no verifier and is not used", extra={"replica_id": replica_id}
            )
        self._warned_of = useless

    def is_draining(self, replica_id: str) -> bool:
        """Tells whether a replica is marked as draining."""
        return any(each.draining for each in self.replicas if each.replica_id == replica_id)

    async def keep_fresh(self, interval_s: float, client: VerifierClient, on_refreshed: Callable[[], None]) -> None:
        """Refreshes without end, once per interval.

        Args:
            interval_s: Pause between two readings, in seconds.
            client: Its channels to verifiers that are gone are closed.
            on_refreshed: Called after each reading.
        """
        while True:
            await asyncio.sleep(interval_s)
            await self.refresh()
            on_refreshed()
            await client.keep_only(self.addresses())
