"""A kept response: what clients see of it, the conversation before it, and how both are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.http.response import to_json
from paceline.store.base import EPOCHS_PER_OWNER
from paceline.store.documents import FINAL, Document

Json = dict[str, Any]

IN_PROGRESS, INCOMPLETE, FAILED, CANCELLED = "in_progress", "incomplete", "failed", "cancelled"
# Why a response is incomplete: its client or its gateway left. It can still be streamed to its end for a while.
INTERRUPTED = "interrupted"
# What a response repeats of its request, and what it may be long for.
ECHOED = ("instructions", "metadata", "text", "tool_choice", "tools")
# The part of the room for all responses that one may take with its request.
LARGEST_PART = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A response as it is kept.

    Attributes:
        api_key: Name of the key of its request; empty without keys.
        response: As clients see it.
        messages: The conversation before it, without instructions.
        request: What does not change any more, as it is written: messages, and what `ECHOED` names.
        rank: See `running_rank`.
        at_work: Whether a gateway runs it.
    """

    api_key: str
    response: Json
    messages: Sequence[Json]
    request: bytes = field(repr=False)
    rank: int
    at_work: bool = False

    @property
    def response_id(self) -> str:
        return str(self.response["id"])

    @property
    def final(self) -> bool:
        """Whether nothing about it will change; otherwise its session may be run to its end, if it is still known."""
        return self.rank == FINAL

    @property
    def size(self) -> int:
        """About how many bytes it has when it is written."""
        return len(self.request) + sum(map(_num_characters, self.response["output"]))

    def document(self) -> Document:
        rest = {**self.response, **dict.fromkeys(ECHOED)}
        body = b"\n".join((self.request, to_json(rest)))
        return Document(keeper=self.api_key, name=self.response_id, body=body, rank=self.rank, at_work=self.at_work)

    @classmethod
    def from_document(cls, document: Document) -> KeptResponse:
        """Reads what `document` has written.

        Raises:
            ValueError: It has not.
            LookupError: It has not.
        """
        request, rest = document.body.split(b"\n")
        fixed = json.loads(request)
        response = {**json.loads(rest), **{name: fixed[name] for name in ECHOED}}
        return cls(
            api_key=document.keeper,
            response=response,
            messages=fixed["messages"],
            request=request,
            rank=document.rank,
            at_work=document.at_work,
        )


def running_rank(epoch: int) -> int:
    """Returns the rank of a response whose session runs under an epoch; one that broke off there has one more.

    So a gateway that lost the session to another writes nothing over what that one has written.
    """
    return 2 * (epoch // EPOCHS_PER_OWNER)


def as_written(messages: Sequence[Json], echoed: Mapping[str, Any], room_bytes: int) -> bytes:
    """Returns what is kept of a request.

    Args:
        messages: The conversation, without instructions.
        echoed: What the response repeats of it.
        room_bytes: For all kept responses.

    Raises:
        InvalidRequestError: It is too long to be kept.
    """
    written = to_json({**echoed, "messages": messages})
    most = room_bytes // LARGEST_PART
    if len(written) > most:
        raise InvalidRequestError(
            "store", f"must be false: the conversation has {len(written)} bytes, and at most {most} are kept"
        )
    return written


def interrupted() -> Json:
    """Returns the fields of a response whose client or gateway has left."""
    return {"status": INCOMPLETE, "incomplete_details": {"reason": INTERRUPTED}}


def _num_characters(item: Json) -> int:
    texts = (each.get("text", "") for each in item.get("content", ()))
    return len(item.get("arguments", "")) + sum(map(len, texts))
