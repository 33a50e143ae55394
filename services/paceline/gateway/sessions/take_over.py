"""Takes over a session that another gateway, or another call, ran before: from its record to a request to run.

The client states how many generated tokens it has, and proves which. Tokens that the log holds beyond them are sent
again, and the rest is computed again; either way the client gets each token once. The log shows whether a session has
finished.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import EndsEnginesError, InvalidRequestError, SessionNotFoundError
from paceline.core.messages import FinishReason
from paceline.core.params import SESSION, SamplingParams, SpeculationParams
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.message.form import MessageForm
from paceline.gateway.sessions.known_tokens import check_known
from paceline.gateway.sessions.request import SessionRequest, check_stops
from paceline.service.fair_shares import Caller
from paceline.store.base import LoggedSession, SessionState, Store

MAX_SESSION_ID_CHARS = 128
# A session goes on that often without counting against the rate of its key: more often than gateways die under one.
FREE_RESUMPTIONS = 4
# Pauses before looks for a record, which is written some hundredths of a second after its session begins.
PAUSES_S = (0.0, 0.05, 0.2, 0.5)
# A session counts as run for this long after its gateway last wrote its record, which it does every 5 s.
RUNNING_S = 30.0


class Resumption:
    """Claims sessions for one gateway.

    Args:
        store: Records and logs.
        fleet: The models served.
        owner: Replica id of the gateway.
    """

    def __init__(self, store: Store, fleet: Fleet, owner: str) -> None:
        self._store = store
        self._fleet = fleet
        self._owner = owner

    async def claim_for(self, caller: Caller, session_id: str, offset: int, digest: str) -> SessionRequest:
        """Does what `claim` does for a caller whose request has been counted.

        The first resumptions of a session are not: it was counted when it began.
        """
        session = await self.claim(session_id, offset, digest, caller.name)
        if caller.give_back is not None and session.num_resumptions <= FREE_RESUMPTIONS:
            await caller.give_back()
        return session

    async def claim(self, session_id: str, offset: int, digest: str, api_key: str) -> SessionRequest:
        """Returns what is left of a session to run; from now on this gateway owns it.

        Args:
            session_id: The id in every message of the session.
            offset: Generated tokens that the client has.
            digest: Their digest; see `paceline.core.messages`.
            api_key: Name of the caller's key.

        Raises:
            InvalidRequestError: A field cannot be right.
            SessionNotFoundError: There is no such record for this key.
            ResumeMismatchError: The client has other tokens than the session.
            EndsEnginesError: The session has ended the engines that ran it.
            ModelNotFoundError: Its model is not served here.
            UnavailableError: The store does not answer, or no verifier of the model is there.
        """
        if not 1 <= len(session_id) <= MAX_SESSION_ID_CHARS:
            raise InvalidRequestError(
                "session_id", f"must have 1 to {MAX_SESSION_ID_CHARS} characters, got {len(session_id)}"
            )
        logged = await self._logged(session_id, api_key)
        if logged is not None:
            # Everything is checked before the session is taken from its present owner.
            self._request(logged, offset, digest)
            logged = await self._store.claim_session(session_id, self._owner)
        if logged is None:
            raise SessionNotFoundError(
                f"session_id: {session_id[:80]!r} is not known; it ended too long ago, or never was recorded"
            )
        return self._request(logged, offset, digest)

    async def runs(self, session_id: str, api_key: str) -> bool:
        """Whether a gateway runs a session, or has just ended it, by its record.

        Raises:
            UnavailableError: The store does not answer.
        """
        logged = await self._logged(session_id, api_key)
        return logged is not None and logged.age_s < RUNNING_S

    async def _logged(self, session_id: str, api_key: str) -> LoggedSession | None:
        """A session's record; None under another key, as a caller does not learn that it exists there."""
        for pause_s in PAUSES_S:
            # Its gateway may be about to write: a client that lost its connection early comes back at once.
            await asyncio.sleep(pause_s)
            logged = await self._store.session(session_id)
            if logged is not None and logged.record.api_key == api_key:
                return logged
        return None

    def _request(self, logged: LoggedSession, offset: int, digest: str) -> SessionRequest:
        record = logged.record
        if record.state is SessionState.REFUSED:
            raise EndsEnginesError(
                f"session_id: {record.engine_deaths} engines in a row died while they ran it; it is not run again"
            )
        parameters = _parameters(record.params_json)
        sampling: SamplingParams = parameters["sampling"]
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            raise InvalidRequestError("session_id", "names a session with log probabilities, which are not logged")
        if not 0 <= offset <= sampling.max_tokens:
            raise InvalidRequestError(
                "offset", f"must be from 0 to the session's max_tokens of {sampling.max_tokens}, got {offset}"
            )
        model = self._fleet.model(record.model)
        logged_ids = logged.token_ids[record.prompt_len :]
        committed, finished = _up_to_end(logged_ids, sampling, model.identity.eos_token_ids)
        check_known(offset, digest, committed)
        return SessionRequest(
            model=model,
            session_id=record.session_id,
            prompt_token_ids=logged.token_ids[: record.prompt_len],
            api_key=record.api_key,
            weights_hash=record.weights_hash,
            arithmetic=record.arithmetic,
            engine_deaths=record.engine_deaths,
            epoch=record.epoch,
            committed_token_ids=committed,
            offset=offset,
            digest=digest,
            finished=finished,
            **parameters,
        )


def _parameters(params_json: str) -> dict[str, Any]:
    """Returns the fields of a request that a record holds; see `paceline.gateway.sessions.records.session_record`.

    Raises:
        SessionNotFoundError: They cannot be read: the writer of the record was no gateway of this version.
    """
    try:
        values = json.loads(params_json)
        return {
            **{name: _checked(name, values[name]) for name in SESSION if name in values},
            "sampling": SamplingParams(**_with_tuples(values["sampling"])),
            "speculation": SpeculationParams(**_with_tuples(values["speculation"])),
            "stops": check_stops(values["stop"]),
            "include_stop_str_in_output": bool(values.get("include_stop_str_in_output", False)),
            "skip_special_tokens": bool(values.get("skip_special_tokens", True)),
            "return_token_ids": bool(values.get("return_token_ids", False)),
            "traceparent": str(values.get("traceparent", "")),
            "form": MessageForm.from_json(values.get("form")),
        }
    except (ValueError, TypeError, LookupError, AttributeError, InvalidRequestError) as error:
        raise SessionNotFoundError(f"session_id: its record cannot be read ({type(error).__name__})") from error


def _checked(name: str, value: Any) -> Any:
    """Returns a parameter of a session from JSON; raises TypeError or InvalidRequestError if it cannot be one."""
    if type(value) is not type(SESSION[name].default):
        raise TypeError(f"{name} is of another type")
    SESSION[name].check(name, value)
    return value


def _with_tuples(values: Any) -> Any:
    """Parameters from JSON, which knows no tuples."""
    if isinstance(values, dict):
        return {name: _with_tuples(value) for name, value in values.items()}
    return tuple(map(_with_tuples, values)) if isinstance(values, list) else values


def _up_to_end(
    committed: tuple[int, ...], sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Returns generated tokens up to the one that ends the text, and why it ends there; None: it goes on.

    Args:
        committed: Generated tokens.
        sampling: The session's sampling parameters.
        eos_token_ids: The model's end tokens.
    """
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    for index, token_id in enumerate(committed):
        if token_id in ends:
            return committed[: index + 1], FinishReason.STOP
    if len(committed) >= sampling.max_tokens:
        return committed[: sampling.max_tokens], FinishReason.LENGTH
    return committed, None
