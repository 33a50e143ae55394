"""What every service's metrics stand on: a registry that tells who the process is, and labels that cost little.

It knows no service.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from paceline import __version__

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


def service_registry(role: str) -> CollectorRegistry:
    """Returns the registry of a process: its memory, CPU time and file descriptors, and what was built."""
    # A second series for each counter and histogram, with the time it was made; nothing reads them.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Gauge("paceline:build_info", "Version of this process; always 1.", ("role", "version"), registry=registry)
    build.labels(role, __version__).set(1)
    return registry


def tell_replica(registry: CollectorRegistry, *, role: str, replica_id: str, address: str, model: str = "") -> None:
    """Tells which replica of the fleet this process is; dashboards join on it."""
    info = Gauge(
        "paceline:replica_info",
        "Who this process is in the registry; always 1.",
        ("role", "replica_id", "address", "model"),
        registry=registry,
    )
    info.labels(role, replica_id, address, model).set(1)


class Family(Generic[MetricT]):
    """A metric with labels; its children are kept at hand, since looking one up costs twice what counting does.

    Args:
        metric: With at least one label.
        known: Label values that are shown from the start: a counter that appears with its first event hides it.
    """

    def __init__(self, metric: MetricT, known: Iterable[tuple[str, ...]] = ()) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], MetricT] = {}
        for values in known:
            self.labels(*values)

    def labels(self, *values: str) -> MetricT:
        """Returns the child of these label values, in the order of the labels."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child


class Meter:
    """Makes the metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counter = partial(Counter, registry=registry)
        self.gauge = partial(Gauge, registry=registry)
        self.histogram = partial(Histogram, registry=registry)

    def counters(self, name: str, documentation: str, *labels: str, known: Iterable[str] = ()) -> Family[Counter]:
        """Returns counters with labels; `known` are values of a single label that are shown from the start."""
        return Family(self.counter(name, documentation, labels), known=((value,) for value in known))
