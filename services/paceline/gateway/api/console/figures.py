"""The console: its files, and the figures of its page: the fleet by the registry, and what its verifiers counted.

Files are the same for everybody. The page turns two answers into rates, so nothing is remembered here for any viewer.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paceline.core.addresses import is_address
from paceline.core.messages import VERIFIER
from paceline.store.base import Replica

# However many pages ask, replicas are read no more often.
INTERVAL_S = 0.5
# A replica that takes longer, or says more, is shown without figures; so is the rest of a larger fleet.
READ_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_READ_REPLICAS = 256
MAX_READS_AT_ONCE = 16
# The sums that the page needs of a verifier. A turn is a session that decoded in a step: it got a token of the target's
# own, and accepted drafts besides.
COUNTERS = {
    "paceline:step_seconds_count": "steps",
    "paceline:gamma_count": "turns",
    "paceline:gamma_sum": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
# Its labels say whether the verifier drafts, and why; its value, since when.
MODE = "paceline:mode_since_seconds"

Json = dict[str, Any]


class Figures:
    """Figures of the fleet that `replicas` returns."""

    def __init__(self, replicas: Callable[[], Sequence[Replica]]) -> None:
        self._replicas = replicas
        self._lock = asyncio.Lock()
        self._latest: Json = {"at_s": -INTERVAL_S}

    async def read(self) -> Json:
        """Returns the latest figures; `at_s` is a clock of seconds, so that rates can be taken."""
        async with self._lock:
            if time.monotonic() - self._latest["at_s"] >= INTERVAL_S:
                self._latest = await self._look()
            return self._latest

    async def _look(self) -> Json:
        replicas = list(self._replicas())
        verifiers = [each for each in replicas if each.role == VERIFIER][:MAX_READ_REPLICAS]
        gate = asyncio.Semaphore(MAX_READS_AT_ONCE)
        # Redirects are not followed, so that only addresses of the registry are read. Certificates are not checked.
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=READ_TIMEOUT_S) as client:
            pages = await asyncio.gather(*(_read(client, gate, each.metrics_address) for each in verifiers))
        told = {each.replica_id: page for each, page in zip(verifiers, pages, strict=True)}
        return {
            "at_s": time.monotonic(),
            "replicas": [_shown(each, told.get(each.replica_id)) for each in replicas],
        }


async def _read(client: httpx.AsyncClient, gate: asyncio.Semaphore, address: str) -> Json | None:
    """What a verifier's page of metrics says, None if it cannot be read."""
    page = bytearray()
    with suppress(httpx.HTTPError, TimeoutError, ValueError):
        async with gate, asyncio.timeout(READ_TIMEOUT_S):
            if not is_address(address):
                return None
            async with client.stream("GET", f"http://{address}/metrics") as response:
                response.raise_for_status()
                async for part in response.aiter_bytes():
                    page += part
                    if len(page) > MAX_PAGE_BYTES:
                        return None
        return told_by(page.decode(), time.time())
    return None


def told_by(page: str, now_s: float) -> Json:
    """Counters of a page of metrics, by the console's short names and summed over labels, and the verifier's mode.

    Raises:
        ValueError: It is no such page.
    """
    counters, mode = dict.fromkeys(COUNTERS.values(), 0.0), None
    # Most lines are buckets of histograms, and parsing is what takes time.
    lines = [line for line in page.splitlines() if line.startswith((MODE, *COUNTERS))]
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if sample.name == MODE:
                mode = {**sample.labels, "for_s": max(0.0, now_s - sample.value)}
            else:
                counters[COUNTERS[sample.name]] += sample.value
    return {"counters": counters, "mode": mode}


def _shown(replica: Replica, told: Json | None) -> Json:
    return {
        "id": replica.replica_id,
        "role": replica.role,
        "address": replica.address,
        "zone": replica.zone,
        "model": "" if replica.identity is None else replica.identity.name,
        "sessions": replica.num_sessions,
        "max_sessions": replica.max_sessions,
        "draining": replica.draining,
        **(told or {"counters": None, "mode": None}),
    }


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

    files = [Route(path, partial(_file, *_static_file(*what)), methods=["GET"]) for path, what in FILES.items()]
    return [*files, Route(FIGURES_PATH, show)]


def _static_file(name: str, media_type: str) -> tuple[bytes, Mapping[str, str]]:
    """Returns a file, which is read at start, and its headers."""
    content = (STATIC / name).read_bytes()
    # Browsers ask each time whether it is still the same: a new release shows at once.
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return content, {"content-type": media_type, "cache-control": "no-cache", "etag": etag, **SECURITY_HEADERS}


async def _file(content: bytes, headers: Mapping[str, str], request: Request) -> Response:
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
