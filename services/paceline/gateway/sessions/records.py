"""Writes session records and token logs to the store in the background, never on the token path.

What has changed is gathered and written once an interval, a new session at once, so that it can be resumed from its
first token on. A store that does not answer costs records, never tokens; one that lost everything gets it anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from paceline.core.errors import UnavailableError
from paceline.core.messages import SpeculationRecord, law_only
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.suspicion import Suspicion
from paceline.obs.tracing import traceparent_of
from paceline.store.base import AdvanceSession, PutSession, Replica, SessionRecord, SessionState, SessionWrite, Written

# With so many sessions waiting for a store that is away, one that ends goes unrecorded.
MAX_CHANGED = 10_000
# Writes of one exchange with the store.
MAX_WRITES = 256
# New sessions of so many seconds are written together.
LEAST_PAUSE_S = 0.02
# Between the names of several arithmetics.
AND = " + "
# A record is renewed when this share of its life has passed without news.
RENEWAL_SHARE = 1 / 3

_log = logging.getLogger(__name__)


class RecordStore(Protocol):
    """The part of the store that is needed here."""

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        """Makes writes in order and says what became of each."""


def session_record(request: SessionRequest, owner: str) -> SessionRecord:
    """Returns the record of a session before its first placement."""
    prompt = np.asarray(request.prompt_token_ids, dtype="<u4").tobytes()
    parameters: dict[str, Any] = {
        "sampling": asdict(request.sampling),
        "speculation": asdict(request.speculation),
        "stop": list(request.stops),
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "return_token_ids": request.return_token_ids,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
    }
    if request.form is not None:
        parameters["form"] = request.form.to_json()
    if request.span.is_recording():
        # Whoever goes on with the session goes on with the trace.
        parameters["traceparent"] = traceparent_of(request.span)
    return SessionRecord(
        session_id=request.session_id,
        epoch=request.epoch,
        owner=owner,
        api_key=request.api_key,
        model=request.model.identity.name,
        weights_hash=request.weights_hash,
        arithmetic=request.arithmetic,
        engine_deaths=request.engine_deaths,
        verifier_id="",
        seed=request.sampling.seed,
        prompt_hash=hashlib.sha256(prompt).hexdigest(),
        prompt_len=len(request.prompt_token_ids),
        committed_len=len(request.committed_token_ids),
        state=SessionState.RUNNING,
        params_json=json.dumps(parameters, separators=(",", ":")),
    )


class SessionTrail:
    """One session as the store is to know it; says nothing to the store itself.

    Attributes:
        record: As of now, save for `committed_len`, which follows from the log.
        token_ids: Prompt and committed tokens.
        suspicion: Whether it ends the engines that run it.
        speculation: What speculation did for it here, as far as verifiers told; not part of the record.
    """

    def __init__(
        self,
        record: SessionRecord,
        token_ids: Sequence[int],
        on_change: Callable[[SessionTrail], None],
        on_taken_over: Callable[[], None],
        *,
        keeps_tokens: bool = True,
    ) -> None:
        self.record = record
        self.token_ids = list(token_ids)
        self.suspicion = Suspicion(record.engine_deaths, has_tokens=len(token_ids) > record.prompt_len)
        self.speculation: SpeculationRecord | None = None
        self._keeps_tokens = keeps_tokens
        self.on_taken_over = on_taken_over
        self._on_change = on_change
        # Tokens that the store has; None: it must be given the whole record.
        self._logged_len: int | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.record.state is not SessionState.RUNNING

    @property
    def committed_token_ids(self) -> tuple[int, ...]:
        """Generated tokens so far."""
        return tuple(self.token_ids[self.record.prompt_len :])

    @property
    def mixed(self) -> bool:
        """Whether verifiers of different arithmetic have computed it."""
        return AND in self.record.arithmetic

    @property
    def law_only(self) -> bool:
        """Whether a verifier has computed it that promises the law of a text and not its tokens."""
        return any(map(law_only, self.record.arithmetic.split(AND)))

    def may_go_to(self, verifier: Replica) -> bool:
        """Whether a verifier may go on with it: the weights are those it began with.

        A session that promises the same tokens needs the same arithmetic as well; any other says that it was mixed.
        """
        identity, record = verifier.identity, self.record
        if identity is None or not record.weights_hash:
            return identity is not None
        same_bits = not self._keeps_tokens or identity.arithmetic in record.arithmetic.split(AND)
        return identity.weights_hash == record.weights_hash and same_bits

    def suspect(self, suspicion: Suspicion) -> None:
        """An attempt to run it has ended."""
        self.suspicion = suspicion
        self.record = replace(self.record, engine_deaths=suspicion.num_deaths)

    def placed(self, epoch: int, verifier: Replica) -> None:
        """The session starts, or starts anew, on a verifier."""
        self.record = replace(
            self.record,
            epoch=epoch,
            verifier_id=verifier.replica_id,
            weights_hash=verifier.identity.weights_hash if verifier.identity else "",
            arithmetic=self._arithmetic_with(verifier),
        )
        self._logged_len = None
        self._on_change(self)

    def _arithmetic_with(self, verifier: Replica) -> str:
        mine, known = verifier.identity.arithmetic if verifier.identity else "", self.record.arithmetic
        if not self.committed_token_ids or mine in known.split(AND):
            return known if self.committed_token_ids else mine
        return f"{known}{AND}{mine}"

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed."""
        self.token_ids += token_ids
        self._on_change(self)

    def end(self, state: SessionState) -> None:
        """The session ended."""
        self.record = replace(self.record, state=state)
        self._on_change(self)

    def next_write(self, ttl_s: float) -> SessionWrite:
        """What would bring the store up to date."""
        record = self.record
        if self._logged_len is None:
            whole = replace(record, committed_len=len(self.token_ids) - record.prompt_len)
            return PutSession(record=whole, token_ids=tuple(self.token_ids), ttl_s=ttl_s)
        return AdvanceSession(
            session_id=record.session_id,
            epoch=record.epoch,
            owner=record.owner,
            base_len=self._logged_len,
            token_ids=tuple(self.token_ids[self._logged_len :]),
            state=record.state,
        )

    def wrote(self, write: SessionWrite) -> None:
        """A write was made; the trail may have gone on since, even to another verifier."""
        if isinstance(write, AdvanceSession):
            if self._logged_len is not None:
                self._logged_len = write.base_len + len(write.token_ids)
        elif write.record.epoch == self.record.epoch:
            self._logged_len = len(write.token_ids)

    def lost(self) -> None:
        """The store does not have the record any more."""
        self._logged_len = None


class RecordWriter:
    """Takes what is to be recorded without waiting, and writes it later.

    Args:
        store: Where to.
        ttl_s: Life of a record after its last change.
        owner: Replica id of this gateway.
        clock: Monotonic seconds.
    """

    def __init__(
        self, store: RecordStore, *, ttl_s: float, owner: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._owner = owner
        self._clock = clock
        # Trails that may change, and when each was written last; those with news.
        self._open: dict[SessionTrail, float] = {}
        self._changed: dict[SessionTrail, None] = {}
        self._opened = asyncio.Event()
        self._failing = False

    def open(self, request: SessionRequest, on_taken_over: Callable[[], None]) -> SessionTrail:
        """Records a session that starts, or goes on here.

        Args:
            request: What runs; its `epoch` is the first of this gateway.
            on_taken_over: Called once if another gateway turns out to own the session.
        """
        token_ids = (*request.prompt_token_ids, *request.committed_token_ids)
        record = session_record(request, self._owner)
        keeps_tokens = request.keeps_tokens
        trail = SessionTrail(record, token_ids, self._note, on_taken_over, keeps_tokens=keeps_tokens)
        self._open[trail] = self._clock()
        return trail

    def _note(self, trail: SessionTrail) -> None:
        if trail not in self._open:
            return
        placed = bool(trail.record.verifier_id)
        if trail.ended and (not placed or len(self._changed) >= MAX_CHANGED):
            self._forget(trail)
            return
        if placed:
            self._changed[trail] = None
        if len(trail.token_ids) <= trail.record.prompt_len + trail.record.committed_len:
            self._opened.set()

    async def keep_writing(self, interval_s: float) -> None:
        """Writes for ever: new sessions at once, progress once an interval in seconds."""
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await self._opened.wait()
            except TimeoutError:
                pass
            self._opened.clear()
            await self.flush()
            await asyncio.sleep(LEAST_PAUSE_S)

    async def flush(self) -> None:
        """Writes what has gathered; what cannot be written now is written later."""
        self._renew()
        left, self._changed = list(self._changed), {}
        try:
            while left:
                await self._write(left[:MAX_WRITES])
                left = left[MAX_WRITES:]
        except UnavailableError as error:
            self._warn(error)
        finally:
            # Whatever cut it off, be it the end of the task.
            self._changed = {**dict.fromkeys(left), **self._changed}

    async def _write(self, trails: Sequence[SessionTrail]) -> None:
        writes = [trail.next_write(self._ttl_s) for trail in trails]
        answers = await self._store.write_sessions(writes)
        self._failing = False
        for trail, write, written in zip(trails, writes, answers, strict=True):
            self._written(trail, write, written)

    def _written(self, trail: SessionTrail, write: SessionWrite, written: Written) -> None:
        match written:
            case Written.DONE:
                trail.wrote(write)
                self._open[trail] = self._clock()
                if trail.ended and trail not in self._changed:
                    self._forget(trail)
            case Written.REFUSED if trail.ended and self._is_stale(trail):
                self._forget(trail)
            case Written.MISSING | Written.REFUSED:
                trail.lost()
                self._changed[trail] = None
            case Written.TAKEN_OVER:
                self._forget(trail)
                trail.on_taken_over()

    def _renew(self) -> None:
        stale_s = self._clock() - self._ttl_s * RENEWAL_SHARE
        for trail, written_s in self._open.items():
            if written_s < stale_s and trail.record.verifier_id:
                self._changed.setdefault(trail)

    def _is_stale(self, trail: SessionTrail) -> bool:
        """Whether a record would have expired, had the store ever taken it."""
        return self._clock() - self._open.get(trail, 0.0) >= self._ttl_s

    def _forget(self, trail: SessionTrail) -> None:
        self._open.pop(trail, None)
        self._changed.pop(trail, None)

    def _warn(self, error: UnavailableError) -> None:
        if not self._failing:
            _log.warning("session records are not written", extra={"error": error})
        self._failing = True
