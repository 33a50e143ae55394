"""Writes session records and token logs to the store in the background, never on the token path.

Changes are gathered and written once per interval; a new session is written at once, so that it can be resumed from its
first token on. A store that does not answer costs records, never tokens; one that lost everything gets it again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from paceline.core.errors import UnavailableError
from paceline.gateway.sessions.recorded import RecordedSession
from paceline.gateway.sessions.request import SessionRequest
from paceline.obs.tracing import traceparent_of
from paceline.store.base import SessionRecord, SessionState, SessionWrite, Store, Written

# While more sessions than these wait for a store that is away, sessions that end are not recorded.
MAX_CHANGED = 10_000
# Writes of one exchange with the store.
MAX_WRITES = 256
# New sessions within this time, in seconds, are written together.
LEAST_PAUSE_S = 0.02
# A record is renewed when this share of its life, or this time in seconds, has passed without news: its gateway learns
# so of a session that was cancelled, or goes on elsewhere, while it waits for a token.
RENEWAL_SHARE, RENEWAL_S = 1 / 3, 5.0

_log = logging.getLogger(__name__)


def session_record(request: SessionRequest, owner: str) -> SessionRecord:
    """Returns the record of a session before its first placement."""
    # Without the prediction, which may be long: it can only change speed.
    speculation = replace(request.speculation, predicted_token_ids=())
    parameters: dict[str, Any] = {
        **request.params(),
        "sampling": asdict(request.sampling),
        "speculation": asdict(speculation),
        "stop": list(request.stops),
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "return_token_ids": request.return_token_ids,
    }
    if request.form is not None:
        parameters["form"] = request.form.to_json()
    if request.span.is_recording():
        # A gateway that takes over the session continues the trace.
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
        prompt_len=len(request.prompt_token_ids),
        committed_len=len(request.committed_token_ids),
        state=SessionState.RUNNING,
        params_json=json.dumps(parameters, separators=(",", ":")),
    )


class RecordWriter:
    """Collects changes without waiting, and writes them later.

    Args:
        store: Where to.
        ttl_s: Life of a record after its last change.
        owner: Replica id of this gateway.
        clock: Monotonic seconds.
    """

    def __init__(self, store: Store, *, ttl_s: float, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._owner = owner
        self._clock = clock
        # Sessions that may change, and when each was last written; recorded_sessions with changes.
        self._open: dict[RecordedSession, float] = {}
        self._changed: dict[RecordedSession, None] = {}
        self._opened = asyncio.Event()
        self._failing = False

    def open(self, request: SessionRequest, on_taken_over: Callable[[], None]) -> RecordedSession:
        """Records a session that starts or continues here.

        Args:
            request: The session; its `epoch` is the first of this gateway.
            on_taken_over: Called once if another gateway turns out to own the session.
        """
        token_ids = (*request.prompt_token_ids, *request.committed_token_ids)
        record = session_record(request, self._owner)
        recorded = RecordedSession(record, token_ids, self._note, on_taken_over, keeps_tokens=request.keeps_tokens)
        self._open[recorded] = self._clock()
        return recorded

    def _note(self, recorded: RecordedSession) -> None:
        if recorded not in self._open:
            return
        placed = bool(recorded.record.verifier_id)
        if recorded.ended and (not placed or len(self._changed) >= MAX_CHANGED):
            self._forget(recorded)
            return
        if placed:
            self._changed[recorded] = None
        if len(recorded.token_ids) <= recorded.record.prompt_len + recorded.record.committed_len:
            self._opened.set()

    async def keep_writing(self, interval_s: float) -> None:
        """Writes without end: new sessions at once, progress once per interval in seconds."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._opened.wait()
            self._opened.clear()
            await self.flush()
            await asyncio.sleep(LEAST_PAUSE_S)

    async def flush(self) -> None:
        """Writes all changes; those that cannot be written now are written later."""
        self._renew()
        left, self._changed = list(self._changed), {}
        try:
            while left:
                await self._write(left[:MAX_WRITES])
                left = left[MAX_WRITES:]
        except UnavailableError as error:
            self._warn(error)
        finally:
            # Also when the task is cancelled.
            self._changed = {**dict.fromkeys(left), **self._changed}

    async def _write(self, recorded_sessions: Sequence[RecordedSession]) -> None:
        writes = [recorded.next_write(self._ttl_s) for recorded in recorded_sessions]
        answers = await self._store.write_sessions(writes)
        self._failing = False
        for recorded, write, written in zip(recorded_sessions, writes, answers, strict=True):
            self._written(recorded, write, written)

    def _written(self, recorded: RecordedSession, write: SessionWrite, written: Written) -> None:
        match written:
            case Written.DONE:
                recorded.wrote(write)
                self._open[recorded] = self._clock()
                if recorded.ended and recorded not in self._changed:
                    self._forget(recorded)
            case Written.REFUSED if recorded.ended:
                self._forget(recorded)
            case Written.MISSING | Written.REFUSED:
                recorded.lost()
                self._changed[recorded] = None
            case Written.TAKEN_OVER:
                self._forget(recorded)
                recorded.on_taken_over()

    def _renew(self) -> None:
        stale_s = self._clock() - min(self._ttl_s * RENEWAL_SHARE, RENEWAL_S)
        for recorded, written_s in self._open.items():
            if written_s < stale_s and recorded.record.verifier_id:
                self._changed.setdefault(recorded)

    def _forget(self, recorded: RecordedSession) -> None:
        self._open.pop(recorded, None)
        self._changed.pop(recorded, None)

    def _warn(self, error: UnavailableError) -> None:
        if not self._failing:
            _log.warning("session records are not written", extra={"error": error})
        self._failing = True
