"""The HTTP application: routes, health, models, metrics; errors become OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import paceline
from paceline.core.errors import ModelNotFoundError, PacelineError
from paceline.gateway.access.keys import KeyRing
from paceline.gateway.api.anthropic.endpoint import ERRORS as MESSAGE_ERRORS
from paceline.gateway.api.anthropic.endpoint import MessagesEndpoint, count_tokens
from paceline.gateway.api.console.figures import Figures, console_routes
from paceline.gateway.api.endpoints.endpoint import BodyReader, Endpoint
from paceline.gateway.api.openai.endpoint import CompletionEndpoint
from paceline.gateway.api.openai.tokenizing import answer_without_session, detokenize, tokenize
from paceline.gateway.api.openapi import PATH, openapi_document
from paceline.gateway.api.responses.endpoint import ERRORS as RESPONSE_ERRORS
from paceline.gateway.api.responses.endpoint import ResponsesEndpoint
from paceline.gateway.api.responses.kept import ResponseShelf
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.http.errors import HttpError, to_http
from paceline.gateway.http.response import ErrorForm
from paceline.gateway.sessions.readiness import readiness
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.obs.attributes import CHAT, TEXT_COMPLETION
from paceline.obs.tracing import OFF, Tracer
from paceline.service.supervision import TaskSupervisor

OWNER = "paceline"
# As older clients of OpenAI's and those of vLLM read it.
PERMISSION = {
    **dict.fromkeys(("allow_create_engine", "allow_fine_tuning", "allow_search_indices", "is_blocking"), False),
    **dict.fromkeys(("allow_logprobs", "allow_sampling", "allow_view"), True),
    "group": None,
    "organization": "*",
}
RESPONSES = "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
# A request that is refused before it comes to its endpoint gets the error in the words of its API, too.
ERROR_FORMS: Mapping[str, ErrorForm] = dict.fromkeys((MESSAGES, COUNT_TOKENS), MESSAGE_ERRORS)


def create_app(
    *,
    sessions: Sessions,
    fleet: Fleet,
    resumption: Resumption,
    registry: CollectorRegistry,
    reader: BodyReader,
    shelf: ResponseShelf,
    started_s: int,
    ping_s: float = 0.0,
    console: Figures | None = None,
    tracer: Tracer = OFF,
    supervisor: TaskSupervisor,
    keys: KeyRing | None = None,
) -> Starlette:
    """Returns the application.

    Args:
        fleet: Knows models and replicas.
        resumption: Takes over sessions whose streams broke off.
        registry: Metrics to show.
        reader: Reads request bodies.
        started_s: Unix time that models are shown with.
        ping_s: Longest silence of a stream; 0: any.
        console: Figures of the console; None: it is not served.
        tracer: Records spans of requests, if tracing is on.
        supervisor: Knows which background tasks fail.
        keys: Knows which API keys are in force; None: callers need none.
    """
    serve = partial(Endpoint, count_error=sessions.count_error, ping_s=ping_s)
    traced = partial(serve, tracer=tracer)
    completions = partial(CompletionEndpoint, sessions, resumption, reader)
    direct = partial(answer_without_session, sessions, reader)
    responses = ResponsesEndpoint(sessions, reader, resumption, shelf)
    posts = {
        "/v1/completions": traced(completions(chat=False), operation=TEXT_COMPLETION, id_prefix="cmpl-"),
        "/v1/chat/completions": traced(completions(chat=True), operation=CHAT, id_prefix="chatcmpl-"),
        RESPONSES: traced(responses, operation=CHAT, id_prefix="resp_", errors=RESPONSE_ERRORS),
        f"{RESPONSES}/{{response_id}}/cancel": serve(responses.cancel, errors=RESPONSE_ERRORS),
        MESSAGES: traced(MessagesEndpoint(sessions, reader), operation=CHAT, id_prefix="msg_", errors=MESSAGE_ERRORS),
        COUNT_TOKENS: serve(partial(direct, count_tokens), id_prefix="tok-", errors=MESSAGE_ERRORS),
        "/tokenize": serve(partial(direct, tokenize), id_prefix="tok-"),
        "/detokenize": serve(partial(direct, detokenize), id_prefix="tok-"),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route(f"{RESPONSES}/{{response_id}}", serve(responses.show, errors=RESPONSE_ERRORS), methods=["GET"]),
        Route(f"{RESPONSES}/{{response_id}}", serve(responses.delete, errors=RESPONSE_ERRORS), methods=["DELETE"]),
        *(console_routes(console) if console is not None else ()),
        *_model_routes(fleet, started_s),
        *_status_routes(sessions, fleet, registry, supervisor, keys),
    ]
    return Starlette(routes=routes, exception_handlers={PacelineError: _on_error, HTTPException: _on_http_exception})


def _status_routes(
    sessions: Sessions, fleet: Fleet, registry: CollectorRegistry, supervisor: TaskSupervisor, keys: KeyRing | None
) -> list[BaseRoute]:
    """Health, load, version and metrics."""

    async def livez(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def health(_: Request) -> Response:
        ready, report = readiness(sessions, fleet, supervisor.failing, "" if keys is None else keys.problem)
        return JSONResponse(report, status_code=200 if ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def load(_: Request) -> Response:
        return JSONResponse({"server_load": sessions.num_running})

    async def version(_: Request) -> Response:
        return JSONResponse({"version": paceline.__version__})

    return [
        Route("/livez", livez),
        Route("/health", health),
        Route("/readyz", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/load", load),
        Route("/version", version),
        Route("/metrics", metrics),
    ]


def _model_routes(fleet: Fleet, started_s: int) -> list[BaseRoute]:
    """The models, and the description of the API."""
    description = json.dumps(openapi_document()).encode()

    async def describe(_: Request) -> Response:
        return Response(description, media_type="application/json")

    async def list_models(_: Request) -> Response:
        models = [_model(fleet, name, started_s) for name in fleet.model_names]
        return JSONResponse({"object": "list", "data": models})

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in fleet.model_names:
            raise ModelNotFoundError(f"model: {name[:80]!r} is not served here")
        return JSONResponse(_model(fleet, name, started_s))

    return [
        Route(PATH, describe),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
    ]


def _model(fleet: Fleet, name: str, started_s: int) -> dict[str, Any]:
    identity = fleet.identity(name)
    return {
        "id": name,
        "object": "model",
        "created": started_s,
        "owned_by": OWNER,
        "root": name if identity is None else identity.name,
        "parent": None,
        "permission": [{"id": f"modelperm-{name}", "object": "model_permission", "created": started_s, **PERMISSION}],
        "max_model_len": None if identity is None else identity.context_len,
        "exact": None if identity is None else identity.exact,
        **({"simulated": True} if identity is not None and identity.simulated else {}),
    }


async def _on_error(request: Request, error: Exception) -> Response:
    del request
    return _response(to_http(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods."""
    assert isinstance(error, HTTPException)
    described = HttpError(
        status=error.status_code,
        type="invalid_request_error",
        message=f"{request.method} {request.url.path}: {error.detail}",
    )
    return _response(described, dict(error.headers or {}))


def _response(described: HttpError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        described.to_bytes(),
        status_code=described.status,
        headers={**(headers or {}), **described.headers()},
        media_type="application/json",
    )
