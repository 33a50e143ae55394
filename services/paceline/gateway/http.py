"""The HTTP application: routes, health, models, metrics; errors become OpenAI's error object."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route

from paceline.core.errors import ModelNotFoundError, PacelineError
from paceline.gateway.completions import BodyLimits, CompletionEndpoint
from paceline.gateway.console.feed import ConsoleFeed
from paceline.gateway.console.pages import console_routes
from paceline.gateway.errors import HttpError, to_http
from paceline.gateway.fleet import Fleet
from paceline.gateway.openapi import PATH, openapi_document
from paceline.gateway.readiness import readiness, report
from paceline.gateway.resume import Resumption
from paceline.gateway.sessions import Sessions
from paceline.gateway.workers import Workers
from paceline.obs.tracing import OFF, Tracer
from paceline.supervision import Supervisor

OWNER = "paceline"


def create_app(
    *,
    sessions: Sessions,
    fleet: Fleet,
    resumption: Resumption,
    registry: CollectorRegistry,
    limits: BodyLimits,
    workers: Workers,
    started_s: int,
    console: ConsoleFeed | None = None,
    tracer: Tracer = OFF,
    supervisor: Supervisor,
) -> FastAPI:
    """Returns the application.

    Args:
        sessions: Runs what is asked for.
        fleet: Names the models and tells how the fleet is.
        resumption: Takes over sessions whose streams broke off.
        registry: Metrics to show.
        limits: Bounds of request bodies.
        workers: Read large ones.
        started_s: Unix time that models are shown with.
        console: Figures of the console; None: it is not served.
        tracer: Records spans of requests, if it does.
        supervisor: Tells which background tasks fail.
    """
    app = FastAPI(title="Paceline gateway", docs_url=None, redoc_url=None, openapi_url=None)
    for path, chat in (("/v1/completions", False), ("/v1/chat/completions", True)):
        endpoint = CompletionEndpoint(sessions, resumption, limits, workers, tracer, chat=chat)
        app.router.routes.append(Route(path, endpoint=endpoint, methods=["POST"]))

    if console is not None:
        app.router.routes += console_routes(console)
    _serve_models(app, fleet, started_s)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/health")
    @app.get("/readyz")
    async def health() -> Response:
        now = readiness(sessions, fleet, supervisor.failing)
        return JSONResponse(report(now, sessions, fleet), status_code=200 if now.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    return app


def _serve_models(app: FastAPI, fleet: Fleet, started_s: int) -> None:
    """What there is to ask for, and how."""
    description = json.dumps(openapi_document()).encode()

    @app.get(PATH)
    async def describe() -> Response:
        return Response(description, media_type="application/json")

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        models = [_model(fleet, name, started_s) for name in fleet.model_names]
        return {"object": "list", "data": models}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        if name not in fleet.model_names:
            raise ModelNotFoundError(f"model: {name[:80]!r} is not served here")
        return _model(fleet, name, started_s)


def _model(fleet: Fleet, name: str, started_s: int) -> dict[str, Any]:
    identity = fleet.identity(name)
    return {
        "id": name,
        "object": "model",
        "created": started_s,
        "owned_by": OWNER,
        "max_model_len": None if identity is None else identity.context_len,
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
