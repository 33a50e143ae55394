"""The console: its files, and the figures of its page: the fleet by the registry, and what its verifiers counted.

Files are the same for everybody. The page turns two answers into rates, so nothing is remembered here for any viewer.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from paceline.core.addresses import is_address
from paceline.core.messages import VERIFIER
from paceline.obs.metrics_page import read_samples
from paceline.store.base import Replica

# However many pages ask, replicas are read no more often.
INTERVAL_S = 0.5
# A replica that takes longer is shown without figures; so is the rest of a larger fleet.
READ_TIMEOUT_S = 2.0
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
MODE, MODE_LABELS = "paceline:mode_since_seconds", ("mode", "reason")
# Tokens a second of each mode and load, and when that was measured.
RATE, MEASURED, RATE_LABELS = "paceline:mode_tokens_per_second", "paceline:mode_measured_seconds", ("mode", "load")
# Draft tokens of each drafter that the verifier has verified and accepted.
BY_DRAFTER = {
    "paceline:drafter_verified_tokens_total": "verified",
    "paceline:drafter_accepted_tokens_total": "accepted",
}
SHOWN = (MODE, RATE, MEASURED, *COUNTERS, *BY_DRAFTER)
# More than that is no verifier's.
MOST_RATES, MOST_DIGITS = 128, 9

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
        guesses = _summed_guesses(pages)
        return {
            "at_s": time.monotonic(),
            "replicas": [_shown(each, told.get(each.replica_id), guesses.get(each.address)) for each in replicas],
        }


def _summed_guesses(pages: Iterable[Json | None]) -> Json:
    """Takes what verifiers counted by drafter out of their pages; returns the sums by the drafters' addresses."""
    sums = defaultdict[str, dict[str, float]](lambda: dict.fromkeys(BY_DRAFTER.values(), 0.0))
    for page in pages:
        for address, counts in page.pop("guesses").items() if page else ():
            for name, count in counts.items():
                sums[address][name] += count
    # Sums of finite counts may not be.
    return {address: each for address, each in sums.items() if all(map(math.isfinite, each.values()))}


async def _read(client: httpx.AsyncClient, gate: asyncio.Semaphore, address: str) -> Json | None:
    """Returns what a verifier's page of metrics says, None if it cannot be read."""
    with suppress(httpx.HTTPError, TimeoutError, ValueError):
        if is_address(address):
            async with gate, asyncio.timeout(READ_TIMEOUT_S):
                return summed(await read_samples(client, address, SHOWN), time.time())
    return None


def summed(samples: Sequence[Sample], now_s: float) -> Json:
    """Returns a verifier's counters by short names and summed over labels, mode, rates, and guesses by drafter.

    Raises:
        ValueError: A sum is not finite.
    """
    counters, mode = dict.fromkeys(COUNTERS.values(), 0.0), None
    rates, guesses = defaultdict[tuple[str, ...], Json](dict), defaultdict[str, dict[str, float]](dict)
    for sample in samples:
        if sample.name == MODE:
            told = {name: sample.labels.get(name, "") for name in MODE_LABELS}
            mode = {**told, "for_s": max(0.0, now_s - sample.value)}
        elif sample.name in (RATE, MEASURED):
            rates[tuple(sample.labels.get(name, "") for name in RATE_LABELS)][sample.name] = sample.value
        elif sample.name in BY_DRAFTER:
            mine, name = guesses[sample.labels.get("drafter", "")], BY_DRAFTER[sample.name]
            mine[name] = mine.get(name, 0.0) + sample.value
        else:
            counters[COUNTERS[sample.name]] += sample.value
    if not all(map(math.isfinite, counters.values())):
        raise ValueError(f"counters must be finite, got {counters}")
    return {"counters": counters, "mode": mode, "rates": _rates(rates, now_s), "guesses": guesses}


def _rates(rates: Mapping[tuple[str, ...], Json], now_s: float) -> list[Json]:
    """Returns rates by mode and load with their age; those that cannot be a verifier's are left out."""
    return [
        {
            "mode": mode,
            "load": int(load),
            "tokens_per_s": values[RATE],
            "age_s": max(0.0, now_s - values.get(MEASURED, now_s)),
        }
        for (mode, load), values in islice(rates.items(), MOST_RATES)
        if RATE in values and load.isascii() and load.isdecimal() and len(load) <= MOST_DIGITS
    ]


def _shown(replica: Replica, told: Json | None, guesses: Json | None) -> Json:
    return {
        "id": replica.replica_id,
        "role": replica.role,
        "address": replica.address,
        "zone": replica.zone,
        "model": "" if replica.identity is None else replica.identity.name,
        "sessions": replica.num_sessions,
        "max_sessions": replica.max_sessions,
        "draining": replica.draining,
        "guesses": guesses,
        **(told or {"counters": None, "mode": None, "rates": []}),
    }


FIGURES_PATH = "/console/figures"
STATIC = Path(__file__).parent / "static"
# Only these files are served.
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/docs/docs.css": ("docs.css", "text/css; charset=utf-8"),
    "/docs/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/docs/swagger-ui.css": ("offapi/swagger_style.css", "text/css; charset=utf-8"),
    "/docs/swagger-ui.js": ("offapi/swagger_bundle.js", "text/javascript; charset=utf-8"),
}
FILE_PATHS = frozenset(FILES)
# Swagger UI has 1.6 MB: a client that reads slowly, and needs no key, holds one piece of it.
PIECE_BYTES = 64 * 1024
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
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
    # Importing offapi would make pages of its own out of all its files, 9 MB.
    path = Path(str(distribution("offapi").locate_file(name))) if name.startswith("offapi/") else STATIC / name
    content = path.read_bytes()
    # Browsers ask each time whether it is still the same: a new release shows at once.
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return content, {"content-type": media_type, "cache-control": "no-cache", "etag": etag, **SECURITY_HEADERS}


async def _file(content: bytes, headers: Mapping[str, str], request: Request) -> Response:
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return StreamingResponse(_pieces(content), headers={"content-length": str(len(content)), **headers})


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]
