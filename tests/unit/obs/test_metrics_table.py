"""docs/observability.md lists exactly the metrics that services register: names, types, labels, services."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from paceline.obs.families import service_registry, tell_replica
from paceline.obs.metrics import DrafterMetrics, GatewayMetrics, VerifierMetrics
from paceline.obs.stalls import stalls_watched
from paceline.supervision import Supervisor

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"
SERVICES: dict[str, Callable[[CollectorRegistry], object]] = {
    "G": lambda registry: GatewayMetrics(registry, ["tiny"]),
    "V": lambda registry: VerifierMetrics(registry, "tiny"),
    "D": lambda registry: DrafterMetrics(registry, "tiny"),
}

# Type, labels and services of a metric.
Row = tuple[str, frozenset[str], frozenset[str]]


async def registered(watching: ExitStack) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for letter, metrics in SERVICES.items():
        registry = service_registry("some role")
        tell_replica(registry, role="some role", replica_id="r", address="a:1")
        metrics(registry)
        Supervisor(registry)
        watching.enter_context(stalls_watched(registry))
        for metric in collectors(registry):
            kind, labels = metric._type, frozenset(metric._labelnames)
            name = metric._name + ("_total" if kind == "counter" else "")
            known = found.get(name, (kind, labels, frozenset()))
            assert known[:2] == (kind, labels), f"{name} is not the same at every service"
            found[name] = (kind, labels, known[2] | {letter})
    return found


def collectors(registry: CollectorRegistry) -> list[MetricWrapperBase]:
    return [each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase)]


def listed() -> dict[str, Row]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(("| `vllm:", "| `paceline:"))
    ]
    return {
        name.strip("`"): (
            kind,
            frozenset(each.strip("` ") for each in labels.split(",") if each),
            frozenset(of.split()),
        )
        for name, kind, labels, of, _ in rows
    }


async def test_the_table_of_metrics_lists_what_services_register() -> None:
    with ExitStack() as watching:
        assert listed() == await registered(watching)
