"""A service's page of metrics: how it is served, and how the console reads those of other services."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.addresses import host_port, is_ipv6
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    import httpx
    from prometheus_client.samples import Sample


@contextmanager
def metrics_server(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serves `/metrics` from a thread while a block runs, which gets the port; 0 picks a free one.

    Raises:
        ConfigError: The port is in use.
    """
    server_class = _Ipv6Server if is_ipv6(host) else _MetricsServer
    try:
        server = make_server(host, port, _text_only(make_wsgi_app(registry)), server_class, _MetricsHandler)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host_port(host, port)} ({error.strerror}); choose another with --host or "
            "--metrics-port, under vLLM with metrics_address"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Connections, each with a thread; one more closes the eldest.
MAX_SCRAPES = 16
# Timeout of an idle connection.
SCRAPE_SILENCE_S = 10.0


class _MetricsServer(ThreadingWSGIServer):
    """Closes the eldest connection where there are too many: 300 that sent nothing held 300 threads for ever."""

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a connection that has just come."""
        with self._lock:
            if len(self._open) >= MAX_SCRAPES:
                eldest = next(iter(self._open))
                del self._open[eldest]
                with suppress(OSError):  # the client has left
                    eldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection at the end of its thread."""
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)


class _Ipv6Server(_MetricsServer):
    address_family = socket.AF_INET6


class _MetricsHandler(WSGIRequestHandler):
    def setup(self) -> None:
        """Bounds each wait for the client."""
        self.request.settimeout(SCRAPE_SILENCE_S)
        super().setup()

    def handle(self) -> None:
        """Serves a scrape; a client that is silent or has left is none of our errors."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
        """Logs nothing: scrapes are not events."""


def _text_only(application: WSGIApplication) -> WSGIApplication:
    """Ignores the formats that a client accepts: OpenMetrics would turn the colons of our names into underscores."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return application(environ, start_response)

    return serve


# Limit of a replica's page; a verifier's has some 100 KiB. Parsing takes 40 us a line, so the parsed part has its own
# bound; a verifier has 20 lines for the console.
MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_PARSED_BYTES = 16 * 1024


async def read_samples(client: httpx.AsyncClient, address: str, names: Collection[str]) -> list[Sample]:
    """Reads some metrics of the replica whose page is at `host:port`; the caller bounds the time.

    Raises:
        httpx.HTTPError: The page cannot be read.
        ValueError: It is no such page, is compressed, or is too long.
    """
    heads, parsed = tuple(name.encode() for name in names), bytearray()
    request = client.stream("GET", f"http://{address}/metrics", headers={"accept-encoding": "identity"})
    async with request as response:
        response.raise_for_status()
        if "content-encoding" in response.headers:
            # Its size would be known only once it is unpacked.
            raise ValueError(f"the page of metrics is compressed: {response.headers['content-encoding'][:80]}")
        num_read, rest = 0, b""
        async for part in response.aiter_raw():
            num_read += len(part)
            *lines, rest = (rest + part).split(b"\n")
            parsed += b"".join(line + b"\n" for line in lines if line.startswith(heads))
            if num_read > MAX_PAGE_BYTES or len(parsed) > MAX_PARSED_BYTES:
                raise ValueError(f"more than {MAX_PAGE_BYTES} bytes of metrics, or {MAX_PARSED_BYTES} of {names}")
    return samples_of((parsed + rest if rest.startswith(heads) else parsed).decode(), names)


def samples_of(page: str, names: Collection[str]) -> list[Sample]:
    """Returns the samples of some metrics of a page.

    Raises:
        ValueError: It is no page of metrics, or holds NaN or an infinity.
    """
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except IndexError as error:
        # The library's, of labels that are cut off.
        raise ValueError(f"no page of metrics: {error}") from None
    wanted = [sample for sample in samples if sample.name in names]
    for sample in wanted:
        if not math.isfinite(sample.value):
            raise ValueError(f"{sample.name} must be finite, got {sample.value}")
    return wanted
