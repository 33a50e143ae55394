"""Every metric of every service, as docs/metrics.md: from what the services register."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from paceline.obs.metrics import (
    VLLM,
    DrafterMetrics,
    GatewayMetrics,
    VerifierMetrics,
    service_registry,
    stalls_watched,
    tell_replica,
)
from paceline.service.credentials import show_days_left
from paceline.service.supervision import TaskSupervisor
from tests.support.references.tables import WRITTEN_BY, code, table

SERVICES: Mapping[str, Callable[[CollectorRegistry], object]] = {
    "G": lambda registry: GatewayMetrics(registry, ["tiny"]),
    "V": lambda registry: VerifierMetrics(registry, "tiny"),
    "D": lambda registry: DrafterMetrics(registry, "tiny"),
}
HEAD = f"""# Metrics

Every metric of every service. {WRITTEN_BY}
[How to scrape and read them](observability.md), with dashboard and alerts.

* The column `of` names the services that have a metric: gateways (G), verifiers (V), drafters (D). If its meaning
  differs between tiers, each is given.
* A histogram is shown as `_bucket`, `_sum` and `_count`.
* All services also show `process_*`: memory, CPU time, file descriptors and start.
"""
VLLMS = """
## Under vLLM's names

Metrics that vLLM has too, with its names and its label `model_name`. Dashboards and load clients of vLLM read them.

"""
OURS = """
## Our own

The drafter tier under `vllm serve` serves those of V at its `metrics_address`.

"""
# By the last word of a name that is here; what has none is counted.
UNITS = {
    "seconds": "seconds",
    "tokens": "tokens",
    "gamma": "tokens",
    "prefix": "tokens",
    "nodes": "nodes",
    "perc": "share, 0 to 1",
    "price": "share, 0 to 1",
    "days": "days",
    "info": "1",
    "up": "0 or 1",
    "drafts": "rounds",
    "round": "rounds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A metric of one or more services.

    Attributes:
        kind: Counter, gauge or histogram.
        labels: Their names, in order.
        said: Its help text, by the letter of the service.
    """

    kind: str
    labels: tuple[str, ...]
    said: Mapping[str, str]


def page() -> str:
    """The whole page.

    Raises:
        ValueError: A name has another type or other labels at another service.
    """
    shown = sorted(asyncio.run(_shown()).items())
    parts = [(VLLMS, [each for each in shown if each[0].startswith(VLLM)])]
    parts.append((OURS, [each for each in shown if not each[0].startswith(VLLM)]))
    head = ("metric", "type", "labels", "unit", "of", "meaning")
    return HEAD + "".join(said + table(head, (_row(*each) for each in rows)) for said, rows in parts)


async def _shown() -> dict[str, Shown]:
    found: dict[str, Shown] = {}
    with ExitStack() as stack:
        for letter in SERVICES:
            for metric in _collectors(_registry(letter, stack)):
                name = metric._name + ("_total" if metric._type == "counter" else "")
                known = found.get(name) or Shown(kind=metric._type, labels=tuple(metric._labelnames), said={})
                if (known.kind, known.labels) != (metric._type, tuple(metric._labelnames)):
                    raise ValueError(f"{name} has another type or other labels at another service")
                said = {**known.said, letter: metric._documentation}
                found[name] = Shown(kind=known.kind, labels=known.labels, said=said)
    return found


def _registry(letter: str, stack: ExitStack) -> CollectorRegistry:
    """All that a service registers."""
    registry = service_registry("some role")
    tell_replica(registry, role="some role", replica_id="r", address="a:1")
    SERVICES[letter](registry)
    TaskSupervisor(registry)
    stack.enter_context(stalls_watched(registry))
    show_days_left(registry, {})
    return registry


def _collectors(registry: CollectorRegistry) -> Iterator[MetricWrapperBase]:
    yield from (each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase))


def _row(name: str, metric: Shown) -> tuple[str, ...]:
    meanings = dict.fromkeys(metric.said.values())
    alike = {said: "".join(letter for letter, each in metric.said.items() if each == said) for said in meanings}
    meaning = " ".join(said if len(alike) == 1 else f"{letters}: {said}" for said, letters in alike.items())
    labels = ", ".join(map(code, metric.labels))
    return code(name), metric.kind, labels, _unit(name), " ".join(metric.said), meaning


def _unit(name: str) -> str:
    words = re.split("[:_]", name)
    return next((UNITS[word] for word in reversed(words) if word in UNITS), "count")
