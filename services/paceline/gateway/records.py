"""Writes session records to the store in the background, never on the token path.

Progress is gathered and written once an interval; a store that does not answer costs records, never tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np

from paceline.core.errors import UnavailableError
from paceline.core.messages import GenerateRequest
from paceline.store.base import SessionRecord

RUNNING = "running"
MAX_PENDING = 10_000

_log = logging.getLogger(__name__)


class RecordStore(Protocol):
    """The part of the store that is needed here."""

    async def put_session(self, record: SessionRecord, ttl_s: float) -> bool:
        """Writes a whole record."""

    async def advance_session(self, session_id: str, epoch: int, committed_len: int, state: str) -> bool:
        """Writes progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    epoch: int
    committed_len: int
    state: str


def session_record(
    request: GenerateRequest, *, model: str, verifier_id: str, drafter_id: str, stops: tuple[str, ...]
) -> SessionRecord:
    """Returns the record of a session that starts."""
    prompt = np.asarray(request.prompt_token_ids, dtype="<u4").tobytes()
    parameters = {
        "sampling": asdict(request.sampling),
        "speculation": asdict(request.speculation),
        "stop": list(stops),
    }
    return SessionRecord(
        session_id=request.session_id,
        epoch=request.epoch,
        model=model,
        verifier_id=verifier_id,
        drafter_id=drafter_id,
        seed=request.sampling.seed,
        prompt_hash=hashlib.sha256(prompt).hexdigest(),
        prompt_len=len(request.prompt_token_ids),
        committed_len=len(request.committed_token_ids),
        state=RUNNING,
        params_json=json.dumps(parameters),
    )


class RecordWriter:
    """Takes what is to be recorded without waiting, and writes it later."""

    def __init__(self, store: RecordStore, *, ttl_s: float) -> None:
        """Writes records that live `ttl_s` seconds after their last change."""
        self._store = store
        self._ttl_s = ttl_s
        self._opened: dict[str, SessionRecord] = {}
        self._progress: dict[str, _Progress] = {}
        self._failing = False

    def open(self, record: SessionRecord) -> None:
        """Records a session that starts, or starts anew under a higher epoch."""
        if len(self._opened) < MAX_PENDING:
            self._opened[record.session_id] = record

    def advance(self, session_id: str, epoch: int, committed_len: int, state: str = RUNNING) -> None:
        """Records progress or the end of a session."""
        if len(self._progress) < MAX_PENDING or session_id in self._progress:
            self._progress[session_id] = _Progress(epoch=epoch, committed_len=committed_len, state=state)

    async def keep_writing(self, interval_s: float) -> None:
        """Writes for ever, once an interval in seconds."""
        while True:
            await asyncio.sleep(interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Writes what has gathered; what cannot be written is dropped."""
        opened, self._opened = self._opened, {}
        progress, self._progress = self._progress, {}
        try:
            for session_id, record in opened.items():
                done = progress.pop(session_id, None)
                if done is not None:
                    record = replace(record, committed_len=done.committed_len, state=done.state)
                await self._store.put_session(record, self._ttl_s)
            for session_id, done in progress.items():
                await self._store.advance_session(session_id, done.epoch, done.committed_len, done.state)
        except UnavailableError as error:
            if not self._failing:
                _log.warning("session records are not written", extra={"error": error})
            self._failing = True
        else:
            self._failing = False
