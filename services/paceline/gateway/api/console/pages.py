"""The console over HTTP: its files, which are the same for everybody, and its figures.

The files reveal nothing about the fleet and are served without a key. The figures name addresses and need a key where
keys are required.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paceline.gateway.api.console.figures import Figures

FIGURES_PATH = "/console/figures"
STATIC = Path(__file__).parent / "static"
# Only these files are served.
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
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


def console_routes(figures: Figures) -> list[BaseRoute]:
    async def show(_: Request) -> Response:
        return JSONResponse(await figures.read())

    files = [Route(path, partial(_file, *_read(*what)), methods=["GET"]) for path, what in FILES.items()]
    return [*files, Route(FIGURES_PATH, show)]


def _read(name: str, media_type: str) -> tuple[bytes, Mapping[str, str]]:
    """Returns a file, which is read at start, and its headers."""
    content = (STATIC / name).read_bytes()
    # Browsers ask each time whether it is still the same: a new release shows at once.
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return content, {"content-type": media_type, "cache-control": "no-cache", "etag": etag, **SECURITY_HEADERS}


async def _file(content: bytes, headers: Mapping[str, str], request: Request) -> Response:
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
