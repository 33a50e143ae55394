"""The session store and registry of the fleet, as one interface; it is never on the token path.

Replicas announce themselves and expire when they stop doing so. A session record has one owner at a time: `epoch`
numbers the ownership, and an owner that lost a session learns it with its next write. If the store lost a claim and two
owners hold the same range of epochs, the one in the store wins. Beside the record is the session's token log, prompt
and committed tokens, from which any gateway can continue.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import ModelIdentity

# The rank that nothing replaces.
FINAL = 1 << 52
# Cost of a document in the store beside its body.
OVERHEAD_BYTES = 1024
_NOWHERE = "--redis-url memory:// keeps nothing; name a Redis or Valkey server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A kept document.

    Attributes:
        keeper: Whom it is kept for; empty: anyone.
        name: Its name among the keeper's, without a colon.
        body: Any bytes.
        rank: Only a document of a higher rank takes its place.
    """

    keeper: str
    name: str
    body: bytes
    rank: int

    @property
    def size(self) -> int:
        return len(self.body) + OVERHEAD_BYTES


class Keeping(enum.Enum):
    """Outcome of a write; only `DONE` changed the store."""

    DONE = "done"
    OUTRANKED = "a document of the same or a higher rank is there"
    MISSING = "there is nothing to replace any more"
    TOO_LARGE = "it does not fit into the room of all documents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A running service, as the registry describes it.

    Attributes:
        address: Where its gRPC server is reached, `host:port`.
        metrics_address: Where its Prometheus page is reached, `host:port`; empty: unknown.
        zone: Where it runs, such as a zone of a cloud; empty: unknown.
    """

    replica_id: str
    role: str
    address: str
    identity: ModelIdentity | None = None
    max_sessions: int = 0
    num_sessions: int = 0
    draining: bool = False
    metrics_address: str = ""
    zone: str = ""


class SessionState(enum.StrEnum):
    """State of a session. `STOP` and `LENGTH` are good ends; whether a session can continue follows from its log.

    A `REFUSED` session ended the engines that ran it, and is not run again.
    """

    RUNNING = "running"
    LEFT = "left"
    FAILED = "failed"
    REFUSED = "refused"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """The fleet's record of a session; its token ids are in the log beside it.

    Attributes:
        owner: Replica id of the gateway that runs it.
        api_key: Name of the API key of its request; empty without keys.
        weights_hash: Fingerprint of the weights it began with; others would continue differently.
        arithmetic: Arithmetic of the verifiers that computed it, several joined by ` + `; see `ModelIdentity`.
        engine_deaths: Engines that died of it, one after another.
        committed_len: Generated tokens in the log, behind `prompt_len` of the prompt.
        params_json: Sampling and speculation parameters and stop strings.
    """

    session_id: str
    epoch: int
    owner: str = ""
    api_key: str = ""
    model: str
    weights_hash: str = ""
    arithmetic: str = ""
    engine_deaths: int = 0
    verifier_id: str
    prompt_len: int
    committed_len: int
    state: SessionState
    params_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSession:
    """Writes a whole record, and the log of its prompt and `committed_len` tokens, for `ttl_s` seconds."""

    record: SessionRecord
    token_ids: Sequence[int]
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceSession:
    """Writes owner, state, and tokens into the log from position `base_len` on; renews the time to live."""

    session_id: str
    epoch: int
    owner: str
    base_len: int
    token_ids: Sequence[int]
    state: SessionState


SessionWrite = PutSession | AdvanceSession


class Written(enum.Enum):
    """Outcome of one write; only `DONE` changed the store."""

    DONE = "done"
    TAKEN_OVER = "a newer epoch owns the session, or another owner the same range of epochs"
    MISSING = "the record is gone, or its log is shorter than the write's base"
    REFUSED = "the server took other writes and not this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSession:
    """A record with its log: the prompt's ids and the generated ones.

    Attributes:
        age_s: Seconds since its owner last wrote it, as far as the store told.
    """

    record: SessionRecord
    token_ids: tuple[int, ...]
    age_s: float = field(default=0.0, compare=False)


class Store:
    """Registry, session records and kept documents; an async context manager that closes itself.

    Every method raises `UnavailableError` when the server does not answer in time; the message names its address. This
    class stands for no server: it knows nothing, forgets announcements, and refuses writes that must last.
    """

    @property
    def num_bad_entries(self) -> int:
        """Entries that the last reading of the registry left out because they cannot be read."""
        return 0

    async def announce(self, replica: Replica, ttl_s: float, *, marked: bool = False) -> bool:
        """Puts a replica into the registry, or renews it, for `ttl_s` seconds; works on a full store, too.

        Args:
            replica: As it is now.
            ttl_s: Time after which it expires.
            marked: Whether it was marked as draining when it last announced itself. If the store has lost the mark, and
                nobody took it back, it is set again.

        Returns:
            Whether it is marked as draining now.
        """
        return False

    async def withdraw(self, replica_id: str) -> None:
        """Takes a replica and its draining mark out of the registry."""

    async def drain(self, replica_id: str, *, draining: bool = True) -> None:
        """Marks a replica as draining for all readers of the registry, or takes the mark back; both are stored."""
        raise UnavailableError(_NOWHERE)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the registered replicas, of one role or all, sorted by id."""
        return []

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        """Makes writes in order, each in one atomic step, all in one exchange with the server.

        Raises:
            UnavailableError: No write was made: the server does not answer, is full, or is a read-only copy.
        """
        raise UnavailableError(_NOWHERE)

    async def session(self, session_id: str) -> LoggedSession | None:
        """Returns a record and its log; None if it is unknown, expired or unreadable."""
        return None

    async def claim_session(self, session_id: str, owner: str) -> LoggedSession | None:
        """Makes `owner` the owner of a session, under an epoch above all of its former owner's; atomic.

        Returns:
            The record at that moment, with its log; None if it is unknown, expired or unreadable.
        """
        return None

    async def keep(self, document: Document, *, ttl_s: float, room_bytes: int, replaces: bool = False) -> Keeping:
        """Writes a document in place of one of a lower rank, in one atomic step.

        Args:
            ttl_s: Life of the document in seconds.
            room_bytes: Room for all documents of all keepers.
            replaces: Whether it is written only if there is one to replace.
        """
        raise UnavailableError(_NOWHERE)

    async def kept(self, keeper: str, name: str) -> Document | None:
        """Returns a document; None if it is unknown, no longer kept, or unreadable."""
        return None

    async def forget(self, keeper: str, name: str) -> bool:
        """Deletes a document; returns whether there was one."""
        return False

    async def note(self, name: str) -> bytes | None:
        """Returns what services of a kind have left for one another; None: nothing, or no longer."""
        return None

    async def write_note(self, name: str, content: bytes, *, ttl_s: float, new: bool = False) -> bool:
        """Writes a note for some seconds; returns False if it is to be new and there is one."""
        return True

    async def ping(self) -> None:
        """Returns when the server answers."""

    async def close(self) -> None:
        """Closes the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# An owner numbers its placements within its own range, so that even an outdated record shows the next range.
EPOCHS_PER_OWNER = 1 << 16
# The numbers of the server's scripts are exact up to here: enough for billions of owners.
MAX_EPOCH = (1 << 53) - 1


def first_owner_epoch(epoch: int) -> int:
    """Returns the first epoch of the range that `epoch` belongs to."""
    return epoch // EPOCHS_PER_OWNER * EPOCHS_PER_OWNER


def next_owner_epoch(epoch: int) -> int:
    """Returns the first epoch of the owner after the one that `epoch` belongs to."""
    return first_owner_epoch(epoch) + EPOCHS_PER_OWNER


async def require(store: Store) -> None:
    """Returns when the store shows its registry. For the start of a service; later the store may come and go.

    Raises:
        ConfigError: It cannot be used; says what to do.
    """
    try:
        # More than a ping: a server may answer that, and refuse scripts, our keys, or several keys at once.
        await store.replicas()
    except UnavailableError as error:
        raise ConfigError(f"{error}; start Redis or Valkey there or give another --redis-url") from error
