"""The fleet as this gateway knows it: the registry, read in the background.

A dead registry leaves the last known fleet in place. Who gets the next session is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from paceline.core.errors import ModelNotFoundError, UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.gateway.requests import ServedModel
from paceline.gateway.routing import DRAFTER, VERIFIER, able_verifiers
from paceline.gateway.text import TextCodec
from paceline.store.base import Replica

# A registry that came back empty fills up within a few heartbeats; until then old entries are better.
RECOVERY_S = 10.0

_log = logging.getLogger(__name__)


class Registry(Protocol):
    """The part of the store that is needed here."""

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive; raises `UnavailableError` when the registry does not answer."""


class Channels(Protocol):
    """Connections to verifiers."""

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Closes connections to other addresses that nobody uses."""


def strange_drafters(replicas: Sequence[Replica]) -> list[Replica]:
    """Returns the drafters whose vocabulary is that of no verifier; they will never be paired."""
    spoken = {r.identity.vocab_hash for r in replicas if r.role == VERIFIER and r.identity is not None}
    return [
        replica
        for replica in replicas
        if replica.role == DRAFTER
        and spoken
        and (replica.identity is None or replica.identity.vocab_hash not in spoken)
    ]


def after_recovery(known: Sequence[Replica], found: Sequence[Replica]) -> list[Replica]:
    """Returns what is found, and what was known and may only not have come back yet."""
    found_ids = {replica.replica_id for replica in found}
    return [*found, *(replica for replica in known if replica.replica_id not in found_ids)]


class Fleet:
    """Replicas and models that this gateway can use.

    Attributes:
        replicas: The fleet as last read.
        store_error: Why the last reading failed; None if it did not.
    """

    def __init__(
        self,
        registry: Registry,
        codecs: Mapping[str, TextCodec],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows no replica until the first `refresh`.

        Args:
            registry: Where replicas announce themselves.
            codecs: Tokenizers by model name; only these models are served.
            clock: Monotonic seconds.
        """
        self.replicas: tuple[Replica, ...] = ()
        self.store_error: str | None = None
        self._registry = registry
        self._codecs = dict(codecs)
        self._clock = clock
        self._failed_s: float | None = None
        self._warned_of: set[str] = set()

    @property
    def model_names(self) -> list[str]:
        """Names of the models that can be asked for, with or without a verifier at the moment."""
        return sorted(self._codecs)

    def identity(self, name: str) -> ModelIdentity | None:
        """Returns what a verifier of the model says of it; None if none is known."""
        return next((replica.identity for replica in able_verifiers(self.replicas, name)), None)

    def model(self, name: str) -> ServedModel:
        """Returns a model by the name users ask for; an empty name means the only one.

        Raises:
            ModelNotFoundError: It is not served here.
            UnavailableError: It is, but no verifier is there, or one for other tokens than ours.
        """
        if not name and len(self._codecs) == 1:
            name = self.model_names[0]
        codec = self._codecs.get(name)
        if codec is None:
            raise ModelNotFoundError(f"model: {name[:80]!r} is not served here; served: {', '.join(self.model_names)}")
        identity = self.identity(name)
        if identity is None:
            raise UnavailableError(f"no verifier of model {name!r} is there at the moment")
        if codec.vocab_hash and codec.vocab_hash != identity.vocab_hash:
            raise UnavailableError(
                f"model {name!r}: this gateway's tokenizer is not the verifier's; start both with the same folder"
            )
        return ServedModel(identity=identity, codec=codec)

    def addresses(self) -> list[str]:
        """Returns where the verifiers listen."""
        return [replica.address for replica in self.replicas if replica.role == VERIFIER]

    async def refresh(self) -> None:
        """Reads the registry once; a failure leaves the last known fleet in place."""
        try:
            found = await self._registry.replicas()
        except UnavailableError as error:
            if self.store_error is None:
                _log.warning("registry unreachable, going on with the last known fleet", extra={"error": error})
            self.store_error = str(error)
            self._failed_s = self._clock()
            return
        if self.store_error is not None:
            _log.info("registry reachable again")
            self.store_error = None
        if self._failed_s is not None and self._clock() - self._failed_s < RECOVERY_S:
            found = after_recovery(self.replicas, found)
        self.replicas = tuple(found)
        self._warn_of_strange_drafters()

    def _warn_of_strange_drafters(self) -> None:
        strange = {replica.replica_id for replica in strange_drafters(self.replicas)}
        for replica_id in sorted(strange - self._warned_of):
            _log.warning(
                "a drafter speaks the vocabulary of no verifier and is not used",
                extra={"replica_id": replica_id},
            )
        self._warned_of = strange

    async def keep_fresh(self, interval_s: float, channels: Channels) -> None:
        """Refreshes for ever, once an interval in seconds; channels to verifiers that are gone are closed."""
        while True:
            await asyncio.sleep(interval_s)
            await self.refresh()
            await channels.keep_only(self.addresses())
