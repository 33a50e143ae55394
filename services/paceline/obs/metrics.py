"""Prometheus metrics under the names users know from vLLM, and our own under `paceline:`.

Each service has a small class that makes its metrics. Engines count by a metric's name (`StepReport`), so a new engine
metric is made here and counted there; other callers count on the objects.
prometheus-client adds `_total` to counters itself.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client import values as metric_values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from paceline import __version__
from paceline.core import errors
from paceline.core.drafting_mode import Mode
from paceline.core.messages import NS_PER_S, REPLICA_ROLES, FinishReason, GenerateResult
from paceline.core.target_events import Reason, StepReport, TargetOutput

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)

# Prefix of metrics that vLLM has, too, and the label that its dashboards filter by.
VLLM, MODEL_NAME = "vllm:", "model_name"


def service_registry(role: str) -> CollectorRegistry:
    """Returns the registry of a process, with its memory, CPU time, file descriptors and version."""
    # Otherwise each counter and histogram has a second series with its creation time, which nothing reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    # Each service shows its own numbers. PROMETHEUS_MULTIPROC_DIR, set for other programs, would put them into files.
    metric_values.ValueClass = metric_values.MutexValue
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Gauge("paceline:build_info", "Version of this process; always 1.", ("role", "version"), registry=registry)
    build.labels(role, __version__).set(1)
    return registry


def tell_replica(registry: CollectorRegistry, *, role: str, replica_id: str, address: str, model: str = "") -> None:
    """Shows which replica of the fleet this process is; dashboards join on it."""
    info = Gauge(
        "paceline:replica_info",
        "Who this process is in the registry; always 1.",
        ("role", "replica_id", "address", "model"),
        registry=registry,
    )
    info.labels(role, replica_id, address, model).set(1)


class Histogram(PrometheusHistogram):
    """A histogram that can count several equal values at once: tokens that come together share their wait."""

    def observe_alike(self, amount: float, count: int) -> None:
        """Counts a value `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class MetricFamily(Generic[MetricT]):
    """A metric with labels that caches its children: looking one up costs twice as much as counting.

    Args:
        metric: With at least one label.
        known: Label values that are shown from the start; a counter that appears later hides its first event.
        first: Values of its first labels, which all children share.
        most: Most children; the one that was used least recently gives way.

    Attributes:
        first: As the argument; set before the first child.
    """

    def __init__(
        self,
        metric: MetricT,
        known: Iterable[tuple[str, ...]] = (),
        *,
        first: tuple[str, ...] = (),
        most: int | None = None,
    ) -> None:
        self._metric = metric
        self.first = first
        self._most = most
        self._children: dict[tuple[str, ...], MetricT] = {}
        for values in known:
            self.labels(*values)

    def labels(self, *values: str) -> MetricT:
        """Returns the child of these values of the other labels, in the order of the labels."""
        child = self._children.get(values)
        if child is None:
            child = self._metric.labels(*self.first, *values)
        if self._most is not None:
            self._keep_recent(values)
        self._children[values] = child
        return child

    def _keep_recent(self, values: tuple[str, ...]) -> None:
        if self._children.pop(values, None) is None and len(self._children) == self._most:
            eldest = next(iter(self._children))
            del self._children[eldest]
            self._metric.remove(*self.first, *eldest)


class Meter:
    """Makes the metrics of one registry; those that vLLM has, too, are labelled with the model, as vLLM's are.

    Args:
        registry: Where they are shown.
        model_name: The model; empty: none, and no metric of vLLM's is made.
        made: Metrics of all models so far, by name.

    Attributes:
        by_name: The metrics that it has made.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str = "", made: dict[str, Any] | None = None) -> None:
        self._registry = registry
        self._model_name = model_name
        self._of_models: dict[str, Any] = {} if made is None else made
        self.by_name: dict[str, Any] = {}

    def of_model(self, model_name: str) -> Meter:
        """Returns one that makes the same metrics of another model."""
        return Meter(self._registry, model_name, self._of_models)

    def record(self, step: StepReport) -> None:
        """Counts what steps have counted, in the metrics that this one has made."""
        for (name, *labels), amount in step.counts.items():
            counter = self.by_name[name]
            (counter.labels(*labels) if labels else counter).inc(amount)
        for name, level in step.levels.items():
            self.by_name[name].set(level)
        for (name, *labels), values in step.samples.items():
            histogram = self.by_name[name].labels(*labels) if labels else self.by_name[name]
            for value, count in Tally(values).items():
                histogram.observe_alike(value, count)

    def counter(self, name: str, documentation: str) -> Counter:
        return self._single(Counter, name, documentation)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """Returns a gauge, with further labels or without."""
        return self._single(Gauge, name, documentation, labels)

    def histogram(
        self, name: str, documentation: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        """Returns a histogram, with further labels or without."""
        return self._single(Histogram, name, documentation, labels, buckets=buckets)

    def counters(
        self, name: str, documentation: str, *labels: str, known: Iterable[str] = (), most: int | None = None
    ) -> MetricFamily[Counter]:
        """Returns counters with labels.

        Args:
            known: Values of a single label that are shown from the start.
            most: Most series; the one that was counted least recently gives way.
        """
        first = (self._model_name,) if name.startswith(VLLM) else ()
        metric = self._made(Counter, name, documentation, labels)
        family = self.by_name[name] = MetricFamily(metric, known=((value,) for value in known), first=first, most=most)
        return family

    def _single(
        self, kind: type[MetricT], name: str, documentation: str, labels: Sequence[str] = (), **settings: Any
    ) -> MetricT:
        metric = self._made(kind, name, documentation, labels, **settings)
        single = self.by_name[name] = metric.labels(self._model_name) if name.startswith(VLLM) else metric
        return single

    def _made(
        self, kind: type[MetricT], name: str, documentation: str, labels: Sequence[str], **settings: Any
    ) -> MetricT:
        if not name.startswith(VLLM):
            return kind(name, documentation, labels, registry=self._registry, **settings)
        known: MetricT | None = self._of_models.get(name)
        if known is None:
            names = (MODEL_NAME, *labels)
            known = self._of_models[name] = kind(name, documentation, names, registry=self._registry, **settings)
        return known


LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
ROUND_TRIP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
GAMMA_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_ROW_LABELS = (*map(str, ROW_BUCKETS), "more")
# Time for which steps are summed: to count one in the library takes as long as to plan it.
SUMMED_S = 1.0

# Why sessions continue without their drafter: its stream is lost, it broke the protocol, is silent, or has gone.
FALLBACK_REASONS = ("link_lost", "protocol_error", "drafter_silent", "drafter_changed")
# Classes of errors by which a gateway counts.
ERRORS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))


def rows_label(num_rows: int) -> str:
    """Returns the `rows` label of a step: the least power of two that holds its rows, so labels stay few."""
    return _ROW_LABELS[bisect_left(ROW_BUCKETS, num_rows)]


class StepTotals:
    """Sums reports of steps, and records them once a second, and whenever the registry is read.

    Args:
        registry: Of the metrics, which are made afterwards: it is read in order.
        record: Records a sum in these metrics.
    """

    def __init__(self, registry: CollectorRegistry, record: Callable[[StepReport], None]) -> None:
        self._record = record
        # Metrics are read in threads of their own.
        self._lock = threading.Lock()
        self._sum: StepReport | None = None
        self._recorded_s = 0.0
        registry.register(self)

    def add(self, report: StepReport) -> None:
        """Adds the report of a step, which belongs to the sum from now on."""
        if report.num_rows:
            report.samples["paceline:step_seconds", rows_label(report.num_rows)].append(report.seconds)
        with self._lock:
            if self._sum is None:
                self._sum = report
            else:
                self._sum.add(report)
        if time.monotonic() - self._recorded_s >= SUMMED_S:
            self.collect()

    def collect(self) -> Iterable[Metric]:
        """Records the sum; it has no metric of its own."""
        with self._lock:
            summed, self._sum, self._recorded_s = self._sum, None, time.monotonic()
            if summed is not None:
                self._record(summed)
        return ()


# Labels by which the time of drafters is divided by tokens: addresses of both, and the drafter's model. A fleet whose
# drafters are replaced all the time would have ever more of them; more than this are hardly in use at once, since a
# counter that is forgotten begins at 0 again.
PAIR_LABELS, MOST_PAIRS = ("verifier", "draft_model", "drafter"), 512


class VerifierMetrics:
    """Metrics of a verifier."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.steps = StepTotals(registry, self.record)
        meter = Meter(registry, model_name)
        self.speculation = SpeculationTotals(meter)
        self.meter = meter
        _of_pages(meter)
        self.under_way = meter.gauge(
            "paceline:sessions", "Sessions accepted and not ended, also while the engine makes no step."
        )
        _of_sessions(meter)
        nodes = (
            "Draft nodes, by the source that guessed them first. fate: accepted, rejected, unverified (fell off or "
            "ended with the session unchecked), late (came when other tokens were committed)."
        )
        seconds = "Time that sources inside the verifier took which are not free."
        turns = "Sessions for which sources inside the verifier were asked, once a step."
        fallbacks = (
            f"Times that sessions went on without their drafter, or with another: {', '.join(FALLBACK_REASONS)}."
        )
        meter.counters("paceline:draft_nodes", nodes, "source", "fate")
        meter.counters("paceline:source_seconds", seconds, "source")
        meter.counters("paceline:source_turns", turns, "source")
        self.fallbacks = meter.counters("paceline:fallbacks", fallbacks, "reason", known=FALLBACK_REASONS)
        self._by_drafter = [meter.counters(*each, *PAIR_LABELS, most=MOST_PAIRS) for each in _BY_DRAFTER]
        self.tell_address("")
        meter.counter(
            "paceline:unmet_drafts",
            "Sessions in steps that drafted whose drafter had sent no guess in time; paceline:gamma_count has all.",
        )
        meter.counter("paceline:round_hits", "Rounds whose committed path stayed in the tree.")
        meter.counter("paceline:round_misses", "Rounds whose committed path left the tree.")
        self._mode: tuple[str, str] | None = None
        self._rates: dict[tuple[str, str], float] = {}
        self._of_steps(meter)

    def add(self, output: TargetOutput) -> None:
        """Counts what a step did, and what became of its sessions."""
        report = output.report
        report.count("vllm:generation_tokens", by=len(output.commit.tokens))
        for each in output.commit.events.values():
            if each.result is not None:
                _add_session(report, each.result)
        self.steps.add(report)

    def record(self, report: StepReport) -> None:
        """Shows what steps have reported; see `StepTotals`."""
        report.levels["vllm:num_requests_running"] = report.num_running
        report.levels["vllm:num_requests_waiting"] = report.num_waiting
        if report.num_rows:
            report.levels["paceline:price"] = report.price
            report.sample("paceline:gamma", *report.gammas)
            if report.reason is not None:
                self.show_mode(report.mode, report.reason)
                self.show_rates(report.measured)
            if report.accepted:
                gammas = sum(report.gammas)
                self.speculation.add_rounds(num_draft_tokens=gammas, num_accepted_tokens=report.accepted)
        self.meter.record(report)

    def tell_address(self, address: str) -> None:
        """Labels what is counted by drafter with the address by which others know this verifier."""
        for family in self._by_drafter:
            family.first = (address,)

    def show_rates(self, measured: Iterable[tuple[str, int, float]]) -> None:
        """Shows rates of modes at a load, as in `StepReport`; one that has changed has been measured now."""
        for mode, num_sessions, rate in measured:
            labels = mode, str(num_sessions)
            # Forgetting leaves a rate as it is, but for rounding.
            if not math.isclose(self._rates.get(labels, 0.0), rate, rel_tol=1e-9):
                self._rates[labels] = rate
                self.mode_rate.labels(*labels).set(rate)
                self.mode_measured.labels(*labels).set_to_current_time()

    def show_mode(self, mode: str, reason: Reason) -> None:
        """Steps are of this mode, for a reason; a change takes the place of what was shown."""
        shown = mode, str(reason)
        if shown == self._mode:
            return
        if self._mode is not None:
            self.mode_since.remove(*self._mode)
        self._mode = shown
        self.mode_since.labels(*shown).set_to_current_time()

    def _of_steps(self, meter: Meter) -> None:
        meter.histogram(
            "paceline:gamma",
            "Draft tokens verified per session and step; 0: plain decoding, see paceline:mode_since_seconds.",
            buckets=GAMMA_BUCKETS,
        )
        price = meter.gauge(
            "paceline:price",
            "Least survival worth drafting for at this load; 1: drafters idle, see paceline:mode_since_seconds.",
        )
        # The policy starts from there: nothing is drafted yet.
        price.set(1.0)
        self.mode_since = meter.gauge(
            "paceline:mode_since_seconds",
            f"Unix time since when steps have had this mode for this reason; one series. mode: {', '.join(Mode)} "
            f"(sources: guesses of sources inside the verifier alone). reason: {', '.join(Reason)}.",
            ("mode", "reason"),
        )
        self.mode_rate = meter.gauge(
            "paceline:mode_tokens_per_second",
            "Tokens a second of all sessions of a step, as the controller has measured each mode. "
            "load: about how many sessions, a power of two.",
            ("mode", "load"),
        )
        self.mode_measured = meter.gauge(
            "paceline:mode_measured_seconds",
            "Unix time when paceline:mode_tokens_per_second was last measured.",
            ("mode", "load"),
        )
        _step_seconds(meter, "Time of one forward step; rows: the least power of two that holds its rows.")
        meter.histogram(
            "paceline:draft_round_trip_seconds",
            "From sending commits to the first node that builds on them.",
            buckets=ROUND_TRIP_BUCKETS_S,
        )
        meter.gauge(
            "paceline:drafter_lag_tokens",
            "Committed tokens that a drafter has not answered, of the session with most; 0 while drafters are idle.",
        )


def _of_sessions(meter: Meter) -> None:
    """Makes what a verifier counts of sessions: how many there are, and where the time of ended ones went."""
    meter.gauge("vllm:num_requests_running", "Sessions in steps.")
    meter.gauge("vllm:num_requests_waiting", "Sessions that wait for a place.")
    meter.counter("vllm:num_preemptions", "Sessions whose pages were taken for others.")
    meter.counter("vllm:generation_tokens", "Tokens committed.")
    _latency(meter, "vllm:request_queue_time_seconds", "From a session's arrival to its first step.")
    _latency(meter, "vllm:request_prefill_time_seconds", "From a session's first step to its first token.")
    _latency(meter, "vllm:request_decode_time_seconds", "From a session's first token to its last.")
    _latency(
        meter,
        "vllm:request_time_per_output_token_seconds",
        "Mean time per token after a session's first, once a session.",
    )


def _add_session(report: StepReport, result: GenerateResult) -> None:
    """Counts where the time of an ended session went."""
    timings = result.timings
    decode_s = timings.decode_ns / NS_PER_S
    seconds = {"queue": timings.queue_ns / NS_PER_S, "prefill": timings.prefill_ns / NS_PER_S, "decode": decode_s}
    for name, value in seconds.items():
        report.sample(f"vllm:request_{name}_time_seconds", value)
    if result.num_generated_tokens > 1:
        mean_s = decode_s / (result.num_generated_tokens - 1)
        report.sample("vllm:request_time_per_output_token_seconds", mean_s)


_BY_DRAFTER = (
    ("paceline:drafter_verified_tokens", "Draft tokens of a drafter that steps have verified."),
    ("paceline:drafter_accepted_tokens", "Draft tokens of a drafter that steps have accepted."),
    ("paceline:drafter_committed_tokens", 'Tokens that steps have committed, by the drafter of the session; "": none.'),
    ("paceline:draft_seconds", "Device time of a drafter inside the verifier."),
)


def _of_pages(meter: Meter) -> None:
    """Makes what every service with a model counts of its pages."""
    meter.gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, from 0 to 1.")
    meter.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
    meter.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")


class DrafterMetrics:
    """Metrics of a drafter."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        meter = Meter(registry, model_name)
        self.steps = StepTotals(registry, meter.record)
        self._model_name, self._address = model_name, ""
        self._draft_seconds = meter.counters(
            "paceline:draft_seconds",
            "Device time of drafting, by verifier: its share of a step's rows is its share of the step.",
            *PAIR_LABELS,
            most=MOST_PAIRS,
        )
        meter.counter("paceline:drafter_nodes_sent", "Draft nodes sent.")
        meter.gauge("paceline:drafter_sessions", "Sessions drafted for.")
        self.num_streams = meter.gauge("paceline:drafter_streams", "Verifiers connected.")
        meter.gauge(
            "paceline:drafter_lag_tokens",
            "Committed tokens not yet in the draft KV cache when a step began, of the session with most.",
        )
        _step_seconds(meter, "Time of one draft step; rows as of a verifier.")
        _of_pages(meter)

    def tell_address(self, address: str) -> None:
        """Labels the device's time with the address by which verifiers know this drafter."""
        self._address = address

    def took(self, verifier: str, seconds: float) -> None:
        """Adds device time of a verifier."""
        self._draft_seconds.labels(verifier, self._model_name, self._address).inc(seconds)


class ModelMetrics:
    """Metrics of a gateway for a model."""

    def __init__(self, meter: Meter) -> None:
        self.time_to_first_token = _latency(
            meter, "vllm:time_to_first_token_seconds", "From the request to its first token."
        )
        self.inter_token_latency = _latency(
            meter, "vllm:inter_token_latency_seconds", "Between tokens, shared evenly within a step."
        )
        self.request_prompt_tokens = meter.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a session that ended well.", buckets=TOKEN_BUCKETS
        )
        self.request_generation_tokens = meter.histogram(
            "vllm:request_generation_tokens", "Tokens generated by a session that ended well.", buckets=TOKEN_BUCKETS
        )
        self.e2e_request_latency = _latency(meter, "vllm:e2e_request_latency_seconds", "From the request to its end.")
        self.num_requests_running = meter.gauge("vllm:num_requests_running", "Sessions under way.")
        self.num_requests_waiting = meter.gauge("vllm:num_requests_waiting", "Sessions under way without a token yet.")
        self.prompt_tokens = meter.counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = meter.counter("vllm:generation_tokens", "Tokens generated for clients.")
        ends = [reason.value for reason in FinishReason]
        self.request_success = meter.counters(
            "vllm:request_success", "Sessions ended well, by reason.", "finished_reason", known=ends
        )
        self.speculation = SpeculationTotals(meter)


class GatewayMetrics:
    """Metrics of a gateway.

    Args:
        registry: Where it is shown.
        models: Names of the models served.
    """

    def __init__(self, registry: CollectorRegistry, models: Iterable[str]) -> None:
        meter = Meter(registry)
        self._models = {name: ModelMetrics(meter.of_model(name)) for name in models}
        failovers = "Sessions that left a verifier for another, by the class of the error."
        self.request_errors = meter.counters(
            "paceline:request_errors",
            "Requests ended by an error, at whichever door, by the error's class.",
            "type",
            known=ERRORS,
        )
        self.failovers = meter.counters("paceline:failovers", failovers, "reason", known=ERRORS)
        self.ejections = meter.counter(
            "paceline:ejections", "Times a verifier that failed its sessions got none for a while."
        )
        self.replicas = MetricFamily(
            meter.gauge("paceline:replicas", "Replicas in the registry that do not drain.", ("role",)),
            known=[(role,) for role in REPLICA_ROLES],
        )
        self.registry_bad_entries = meter.gauge(
            "paceline:registry_bad_entries", "Registry entries left out as they cannot be read; the log says why."
        )
        self.api_keys_bad_lines = meter.gauge(
            "paceline:api_keys_bad_lines",
            "Lines of the file of API keys that are not in force, 1 if the file cannot be read; /health says why.",
        )
        self.store_up = meter.gauge("paceline:store_up", "Whether registry and records answer, 0 or 1.")

    def of(self, model_name: str) -> ModelMetrics:
        """Returns what is counted of a model that is served."""
        return self._models[model_name]


def _latency(meter: Meter, name: str, documentation: str) -> Histogram:
    return meter.histogram(name, documentation, buckets=LATENCY_BUCKETS_S)


def _step_seconds(meter: Meter, documentation: str) -> None:
    name = "paceline:step_seconds"
    meter.by_name[name] = MetricFamily(meter.histogram(name, documentation, ("rows",), buckets=STEP_BUCKETS_S))


class SpeculationTotals:
    """vLLM's speculative counters; the gateway has them too, because load clients scrape the HTTP port."""

    def __init__(self, meter: Meter) -> None:
        self.num_drafts = meter.counter(
            "vllm:spec_decode_num_drafts",
            "Rounds: steps of a session with a draft. A gateway counts them when the session ends.",
        )
        self.num_draft_tokens = meter.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.num_accepted_tokens = meter.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        per_position = "Draft tokens accepted, by position in the draft, from 0."
        self.num_accepted_tokens_per_pos = meter.counters(name, per_position, "position")

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


INTERVAL_S = 0.01
WINDOW_S = 60.0


class LongestStall:
    """The longest stall of the last minute; pure, times are arguments."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # Durations fall: a longer stall supersedes the shorter ones before it.
        self._stalls: deque[tuple[float, float]] = deque()

    def add(self, stall_s: float, now_s: float) -> None:
        """Takes a stall that has just ended."""
        while self._stalls and self._stalls[-1][1] <= stall_s:
            self._stalls.pop()
        self._stalls.append((now_s, stall_s))
        self.longest_s(now_s)

    def longest_s(self, now_s: float) -> float:
        """Returns the longest stall of the window that ends now."""
        while self._stalls and self._stalls[0][0] < now_s - self._window_s:
            self._stalls.popleft()
        return self._stalls[0][1] if self._stalls else 0.0


@contextmanager
def stalls_watched(registry: CollectorRegistry) -> Iterator[None]:
    """Measures the stalls of the running event loop while a block runs, and shows the longest of the last minute."""
    loop = asyncio.get_running_loop()
    longest, longest_cpu = LongestStall(), LongestStall()
    begun_cpu_s = time.thread_time()
    # uvloop's timers do not know when they were due, so `look` gets the time.
    timer: asyncio.Handle

    def look(due_s: float) -> None:
        nonlocal begun_cpu_s
        now_s, cpu_s = loop.time(), time.thread_time()
        stall_s = max(0.0, now_s - due_s)
        longest.add(stall_s, now_s)
        longest_cpu.add(min(stall_s, cpu_s - begun_cpu_s), now_s)
        begun_cpu_s = cpu_s
        look_at(now_s + INTERVAL_S)

    def look_at(due_s: float) -> None:
        nonlocal timer
        timer = loop.call_at(due_s, look, due_s)

    gauge = Gauge(
        "paceline:event_loop_stall_seconds",
        "Longest time in the last minute for which the event loop was blocked: how late a callback came.",
        registry=registry,
    )
    gauge.set_function(lambda: longest.longest_s(loop.time()))
    cpu_gauge = Gauge(
        "paceline:event_loop_stall_cpu_seconds",
        "The same without what other threads and processes took meanwhile: CPU time of the event loop itself.",
        registry=registry,
    )
    cpu_gauge.set_function(lambda: longest_cpu.longest_s(loop.time()))
    look_at(loop.time() + INTERVAL_S)
    try:
        yield
    finally:
        timer.cancel()
