"""Prometheus metrics under the names users know from vLLM, and our own under `paceline:`.

One small class per service holds its metric objects; callers count on these objects directly.
prometheus-client adds `_total` to counters itself. This module knows no service and starts nothing but the
scrape server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from paceline.core.errors import (
    ConfigError,
    EndsEnginesError,
    EngineDiedError,
    InvalidRequestError,
    ModelNotFoundError,
    MovedError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    RemoteProtocolError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.core.messages import REPLICA_ROLES, FinishReason
from paceline.obs.families import Family, counters

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
ROUND_TRIP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
GAMMA_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# Why sessions go on without their drafter: its stream is lost, it broke the protocol, it is silent, or it has gone.
FALLBACK_REASONS = ("link_lost", "protocol_error", "drafter_silent", "drafter_changed")
REQUEST_ERRORS = (
    EndsEnginesError,
    EngineDiedError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PeerLostError,
    RemoteProtocolError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)
FAILOVER_REASONS = (
    EngineDiedError,
    MovedError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    RemoteProtocolError,
    UnavailableError,
)


def rows_label(num_rows: int) -> str:
    """Returns the `rows` label of a step: the least power of two that holds its rows, so labels stay few."""
    return str(next((bucket for bucket in ROW_BUCKETS if num_rows <= bucket), "more"))


class VerifierMetrics:
    """What a verifier counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.speculation = SpeculationTotals(registry)
        self.cache = CacheMetrics(registry)
        self.sessions = SessionMetrics(registry)
        nodes = "Draft nodes, by the source that guessed them first and by what became of them."
        seconds = "Time that sources inside the verifier took which are not free."
        turns = "Sessions that such sources were asked for, once a step."
        fallbacks = "Times that sessions went on without their drafter, or with another, by reason."
        self.draft_nodes = counters(registry, "paceline:draft_nodes", nodes, "source", "fate")
        self.source_seconds = counters(registry, "paceline:source_seconds", seconds, "source")
        self.source_turns = counters(registry, "paceline:source_turns", turns, "source")
        self.fallbacks = counters(registry, "paceline:fallbacks", fallbacks, "reason", known=FALLBACK_REASONS)
        self.round_hits = Counter(
            "paceline:round_hits", "Rounds whose committed path stayed in the tree.", registry=registry
        )
        self.round_misses = Counter(
            "paceline:round_misses", "Rounds whose committed path left the tree.", registry=registry
        )
        self._of_steps(registry)

    def _of_steps(self, registry: CollectorRegistry) -> None:
        self.gamma = Histogram(
            "paceline:gamma",
            "Draft tokens verified per session and step.",
            buckets=GAMMA_BUCKETS,
            registry=registry,
        )
        self.price = Gauge("paceline:price", "Least survival worth verifying at this load.", registry=registry)
        # What the allocator starts from: nothing is drafted yet.
        self.price.set(1.0)
        self.step = _step_seconds("Time of one forward step.", registry)
        self.draft_round_trip = Histogram(
            "paceline:draft_round_trip_seconds",
            "From sending commits to the first node that builds on them.",
            buckets=ROUND_TRIP_BUCKETS_S,
            registry=registry,
        )
        self.drafter_lag = Gauge(
            "paceline:drafter_lag_tokens",
            "Committed tokens that a drafter has not answered, of the session with most.",
            registry=registry,
        )
        self.drafted_sessions = Gauge(
            "paceline:drafted_sessions",
            "Sessions of this verifier by the address of the drafter that drafts for them.",
            ("drafter",),
            registry=registry,
        )


class SessionMetrics:
    """What a verifier counts of sessions: how many there are, and where the time of those that ended went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.under_way = Gauge("paceline:sessions", "Sessions accepted and not ended.", registry=registry)
        self.num_running = Gauge("vllm:num_requests_running", "Sessions in steps.", registry=registry)
        self.num_waiting = Gauge("vllm:num_requests_waiting", "Sessions that wait for a place.", registry=registry)
        self.num_preemptions = Counter(
            "vllm:num_preemptions", "Sessions whose pages were taken for others.", registry=registry
        )
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens committed.", registry=registry)
        self.queue_time = _latency(
            "vllm:request_queue_time_seconds", "From a session's arrival to its first step.", registry
        )
        self.prefill_time = _latency(
            "vllm:request_prefill_time_seconds", "From a session's first step to its first token.", registry
        )
        self.decode_time = _latency(
            "vllm:request_decode_time_seconds", "From a session's first token to its last.", registry
        )
        self.time_per_output_token = _latency(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after a session's first, once a session.",
            registry,
        )


class CacheMetrics:
    """What every service with a model counts of its pages."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.usage = Gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, from 0 to 1.", registry=registry)
        self.prefix_queries = Counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", registry=registry
        )
        self.prefix_hits = Counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", registry=registry)


class DrafterMetrics:
    """What a drafter counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.nodes_sent = Counter("paceline:drafter_nodes_sent", "Draft nodes sent.", registry=registry)
        self.num_sessions = Gauge("paceline:drafter_sessions", "Sessions drafted for.", registry=registry)
        self.num_streams = Gauge("paceline:drafter_streams", "Verifiers connected.", registry=registry)
        self.lag = Gauge(
            "paceline:drafter_lag_tokens",
            "Committed tokens not yet in the draft KV cache when a step began, of the session with most.",
            registry=registry,
        )
        self.step = _step_seconds("Time of one draft step.", registry)
        self.cache = CacheMetrics(registry)


class GatewayMetrics:
    """What a gateway counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.time_to_first_token = _latency(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", registry
        )
        self.inter_token_latency = _latency(
            "vllm:inter_token_latency_seconds", "Between tokens, shared evenly within a step.", registry
        )
        self.e2e_request_latency = _latency(
            "vllm:e2e_request_latency_seconds", "From the request to its end.", registry
        )
        self.num_requests_running = Gauge("vllm:num_requests_running", "Sessions admitted.", registry=registry)
        self.num_requests_waiting = Gauge(
            "vllm:num_requests_waiting", "Those of them without a token yet.", registry=registry
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens taken in.", registry=registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens generated.", registry=registry)
        ends, errors = [reason.value for reason in FinishReason], [kind.__name__ for kind in REQUEST_ERRORS]
        reasons = [kind.__name__ for kind in FAILOVER_REASONS]
        failovers = "Sessions that left a verifier for another, by reason."
        self.request_success = counters(
            registry, "vllm:request_success", "Sessions ended well, by reason.", "finished_reason", known=ends
        )
        self.request_errors = counters(
            registry, "paceline:request_errors", "Requests ended by an error, by type.", "type", known=errors
        )
        self.failovers = counters(registry, "paceline:failovers", failovers, "reason", known=reasons)
        self.ejections = Counter(
            "paceline:ejections", "Times a verifier that failed its sessions got none for a while.", registry=registry
        )
        self.replicas = Family(
            Gauge("paceline:replicas", "Replicas in the registry that do not drain.", ("role",), registry=registry),
            known=[(role,) for role in REPLICA_ROLES],
        )
        self.registry_bad_entries = Gauge(
            "paceline:registry_bad_entries", "Registry entries left out as they cannot be read.", registry=registry
        )
        self.store_up = Gauge("paceline:store_up", "Whether registry and records answer, 0 or 1.", registry=registry)
        self.speculation = SpeculationTotals(registry)


def _latency(name: str, documentation: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, documentation, buckets=LATENCY_BUCKETS_S, registry=registry)


def _step_seconds(documentation: str, registry: CollectorRegistry) -> Family[Histogram]:
    return Family(
        Histogram("paceline:step_seconds", documentation, ("rows",), buckets=STEP_BUCKETS_S, registry=registry)
    )


class SpeculationTotals:
    """vLLM's speculative counters; the gateway has them too, because load clients scrape the HTTP port."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_drafts = Counter("vllm:spec_decode_num_drafts", "Steps of a session with a draft.", registry=registry)
        self.num_draft_tokens = Counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", registry=registry
        )
        self.num_accepted_tokens = Counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", registry=registry
        )
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        per_position = "Draft tokens accepted, by position in the draft."
        self.num_accepted_tokens_per_pos = counters(registry, name, per_position, "position")

    def add_rounds(self, *, num_draft_tokens: int, num_accepted_tokens: Sequence[int]) -> None:
        """Counts a round each of several sessions, those without a draft left out."""
        histogram = [0] * (max(num_accepted_tokens, default=-1) + 1)
        for num_accepted in num_accepted_tokens:
            histogram[num_accepted] += 1
        self.add_session(num_draft_tokens=num_draft_tokens, acceptance_histogram=histogram)

    def add_session(self, *, num_draft_tokens: int, acceptance_histogram: Sequence[int]) -> None:
        """Counts all rounds of a session; histogram entry k: rounds in which exactly k tokens matched."""
        num_rounds = sum(acceptance_histogram)
        self.num_drafts.inc(num_rounds)
        self.num_draft_tokens.inc(num_draft_tokens)
        num_accepted, reached = 0, num_rounds
        for position, num_ended_here in enumerate(acceptance_histogram[:-1]):
            reached -= num_ended_here
            num_accepted += reached
            self.num_accepted_tokens_per_pos.labels(str(position)).inc(reached)
        self.num_accepted_tokens.inc(num_accepted)


class MetricsServer:
    """A running scrape server and what it shows; a context manager that stops it."""

    def __init__(self, registry: CollectorRegistry, server: WSGIServer, thread: threading.Thread) -> None:
        self.registry = registry
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)

    def stop(self) -> None:
        """Stops answering and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_metrics_server(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serves `/metrics` from a thread of its own; port 0 picks a free one.

    Raises:
        ConfigError: The port is in use.
    """
    server_class = _Ipv6Server if ":" in host else ThreadingWSGIServer
    try:
        server = make_server(host, port, _text_only(make_wsgi_app(registry)), server_class, _SilentHandler)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port} ({error.strerror}); choose another with --metrics-port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(registry, server, thread)


class _Ipv6Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
        """Logs nothing: a scrape every few seconds is no event."""


def _text_only(application: WSGIApplication) -> WSGIApplication:
    """Hides what formats the client would like: in OpenMetrics the colons of our names would become underscores."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return application(environ, start_response)

    return serve
