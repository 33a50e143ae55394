"""The base of every service's metrics: a registry that identifies the process, and labels that cost little.

It knows no service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client import values as metric_values
from prometheus_client.metrics import MetricWrapperBase

from paceline import __version__

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


class Family(Generic[MetricT]):
    """A metric with labels that caches its children: looking one up costs twice as much as counting.

    Args:
        metric: With at least one label.
        first: Values of its first labels, which all children share.
        known: Label values that are shown from the start; a counter that appears later hides its first event.
    """

    def __init__(self, metric: MetricT, known: Iterable[tuple[str, ...]] = (), *, first: tuple[str, ...] = ()) -> None:
        self._metric = metric
        self._first = first
        self._children: dict[tuple[str, ...], MetricT] = {}
        for values in known:
            self.labels(*values)

    def labels(self, *values: str) -> MetricT:
        """Returns the child of these values of the other labels, in the order of the labels."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*self._first, *values)
        return child


class Meter:
    """Makes the metrics of one registry; those that vLLM has, too, are labelled with the model, as vLLM's are.

    Args:
        registry: Where they are shown.
        model_name: The model; empty: none, and no metric of vLLM's is made.
        made: Metrics of all models so far, by name.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str = "", made: dict[str, Any] | None = None) -> None:
        self._registry = registry
        self._model_name = model_name
        self._of_models: dict[str, Any] = {} if made is None else made

    def of_model(self, model_name: str) -> Meter:
        """Returns one that makes the same metrics of another model."""
        return Meter(self._registry, model_name, self._of_models)

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

    def counters(self, name: str, documentation: str, *labels: str, known: Iterable[str] = ()) -> Family[Counter]:
        """Returns counters with labels; `known` are values of a single label that are shown from the start."""
        first = (self._model_name,) if name.startswith(VLLM) else ()
        metric = self._made(Counter, name, documentation, labels)
        return Family(metric, known=((value,) for value in known), first=first)

    def _single(
        self, kind: type[MetricT], name: str, documentation: str, labels: Sequence[str] = (), **settings: Any
    ) -> MetricT:
        metric = self._made(kind, name, documentation, labels, **settings)
        return metric.labels(self._model_name) if name.startswith(VLLM) else metric

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
