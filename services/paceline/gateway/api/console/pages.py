"""The console over HTTP: its files, which are the same for everybody, and its stream of figures.

The files reveal nothing about the fleet and are served without a key. The figures name addresses and need a key where
keys are required.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from paceline.gateway.api.console.feed import ConsoleFeed
from paceline.gateway.api.endpoints.endpoint import Call, Endpoint, Work
from paceline.gateway.http.response import STREAM_HEADERS, Exchange

EVENTS_PATH = "/console/events"
STATIC = Path(__file__).parent / "static"
# Only these files are served.
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/fleet.js": ("fleet.js", "text/javascript; charset=utf-8"),
    "/console/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/console/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
    "/console/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/console/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
FILE_PATHS = frozenset(FILES)
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def console_routes(feed: ConsoleFeed) -> list[BaseRoute]:
    """Returns the routes of the console."""
    files = [Route(path, endpoint=_read(*what).respond, methods=["GET"]) for path, what in FILES.items()]
    return [*files, Route(EVENTS_PATH, endpoint=Endpoint(partial(_events, feed)), methods=["GET"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file, read at start."""

    content: bytes
    headers: Mapping[str, str]

    async def respond(self, request: Request) -> Response:
        """Returns the file, or status 304 if the browser has it already."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def _read(name: str, media_type: str) -> _File:
    content = (STATIC / name).read_bytes()
    # Browsers ask each time whether it is still the same: a new release shows at once.
    headers = {
        "content-type": media_type,
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        **SECURITY_HEADERS,
    }
    return _File(content=content, headers=headers)


async def _events(feed: ConsoleFeed, call: Call) -> Work:
    """Answers with server-sent events, one frame a second until the viewer leaves."""
    return _sent(feed, call.exchange)


async def _sent(feed: ConsoleFeed, exchange: Exchange) -> None:
    with feed.watching() as frames:
        await exchange.begin(200, STREAM_HEADERS)
        while (frame := await frames.get()) is not None:
            await exchange.event(frame)
    await exchange.write(b"", last=True)
