"""The resuming client over HTTP: goes on at another gateway when a stream breaks off.

Gateways name events of a stream by an `id:` line; `Last-Event-ID` with the last one brings what follows, at any
gateway. The rest is as over gRPC: a session that is lost begins anew with the same seed, and known text is skipped.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp

from paceline.client.resuming import Progress, ResumingClient
from paceline.core.errors import OverloadedError, PacelineError, SessionNotFoundError, UnavailableError
from paceline.rpc.v1 import gateway_pb2

PATH = "/v1/completions"
CONNECT_S = 3.0
# Gateways name events on request only: widely used clients take every line of a stream for data.
STREAMED = {"stream": True, "stream_options": {"include_event_ids": True}}


class RefusedError(PacelineError):
    """A gateway refuses the request, as any other would."""


class ResumingHttpClient(ResumingClient):
    """Calls gateways; an async context manager.

    Args:
        urls: URLs of gateways, `http://host:port`.
        api_key: Sent with every request; empty: none.
        patience_s: How long to go on trying without new text, in seconds.
        silence_s: Longest wait for the next event of a stream, in seconds.
    """

    def __init__(
        self, urls: Sequence[str], *, api_key: str = "", patience_s: float = 60.0, silence_s: float = 60.0
    ) -> None:
        super().__init__([], patience_s=patience_s)
        self._urls = list(urls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def _attempt(
        self, request: gateway_pb2.GatewayGenerateRequest, progress: Progress, turn: int
    ) -> AsyncGenerator[gateway_pb2.GatewayGenerateResponse, None]:
        """Yields what one gateway answers; the id of the last event stands for the session."""
        headers = {"Last-Event-ID": progress.session_id} if progress.session_id else {}
        url = self._urls[turn % len(self._urls)] + PATH
        try:
            async with self._http.post(url, json=http_body(request), headers=headers) as response:
                await _check(response)
                async for event_id, event in _events(response.content):
                    new = progress.take(_message(event, event_id or progress.session_id))
                    if new is not None:
                        yield new
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"{url}: {type(error).__name__}: {error}") from error


def http_body(request: gateway_pb2.GatewayGenerateRequest) -> dict[str, Any]:
    """A request of the gRPC door as the HTTP door takes it."""
    sampling, speculation = request.sampling, request.speculation
    body: dict[str, Any] = {field.name: value for field, value in sampling.ListFields()}
    body["speculation"] = {"acceptance": speculation.acceptance}
    if speculation.method:
        body["speculation"]["method"] = speculation.method
    if request.model:
        body["model"] = request.model
    return {**body, "prompt": list(request.prompt_token_ids.ids) or request.prompt, **STREAMED}


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises the error that a status other than 200 means."""
    if response.status == HTTPStatus.OK:
        return
    answer = await response.text(errors="replace")
    try:
        raise _error(json.loads(answer)["error"], float(response.headers.get("Retry-After", 1)))
    except (ValueError, LookupError, TypeError):
        raise UnavailableError(f"{response.status}: {answer}") from None


def _error(error: dict[str, Any], retry_after_s: float = 1.0) -> PacelineError:
    """Returns what an error object of a gateway means: whether it is worth another try."""
    text = json.dumps(error)
    match error["code"]:
        case "overloaded":
            return OverloadedError(text, retry_after_s=retry_after_s)
        case "unavailable" | "session_taken_over":
            return UnavailableError(text)
        case "session_not_found":
            return SessionNotFoundError(text)
        case _:
            return RefusedError(text)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields ids and objects of server-sent events up to the last one.

    Raises:
        PacelineError: An event says that the stream has failed, or the stream ended before its last event.
    """
    event_id = ""
    async for raw in content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise _error(event["error"])
            yield event_id, event
        elif not line:
            event_id = ""
    raise UnavailableError("the gateway ended the stream in the middle")


def _message(event: dict[str, Any], event_id: str) -> gateway_pb2.GatewayGenerateResponse:
    """An event of one choice as the gRPC door would send it."""
    message = gateway_pb2.GatewayGenerateResponse(session_id=event_id)
    for choice in event.get("choices", ()):
        message.text = choice["text"]
        if choice["finish_reason"]:
            message.result.finish_reason = choice["finish_reason"]
    return message
