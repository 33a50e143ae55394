"""Our metrics in vLLM's own `/metrics`: a plug-in of its front-end process that reads them from the helper.

vLLM loads it by the entry point `vllm.stat_logger_plugins`. The class must derive from one of vLLM's, so it is made on
first access.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from paceline.core.errors import ConfigError
from paceline.vllm.places import metrics_sockets
from paceline.vllm.settings import uses_tier

PREFIX = "paceline:"
DEADLINE_S = 0.2
READ_BYTES = 1 << 16
# Far more than a helper sends.
MOST_BYTES = 1 << 23
# The label that tells engines apart in vLLM's own metrics.
ENGINE_LABEL = "engine"

_log = logging.getLogger(__name__)


class TierCollector(Collector):
    """Reads the metrics of helpers at each scrape; a helper that is down has none.

    Args:
        sockets: Returns where they are now, by the number of the engine.
    """

    def __init__(self, sockets: Callable[[], Mapping[str, Path]]) -> None:
        self._sockets = sockets

    def describe(self) -> Iterator[Metric]:
        """Returns nothing: the metrics are not known yet when vLLM starts."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Returns our families, with the engine's number as a label."""
        families: dict[str, Metric] = {}
        for engine, path in sorted(self._sockets().items()):
            try:
                found = list(text_string_to_metric_families(read_metrics(path)))
            except (OSError, ValueError) as error:
                _log.debug("no metrics from %s: %s", path, error)
                continue
            for family in found:
                if family.name.startswith(PREFIX):
                    _add(families.setdefault(family.name, _like(family)), family, engine)
        yield from families.values()


def read_metrics(path: Path) -> str:
    """Returns the metrics of a helper as text.

    Raises:
        OSError: It is down, sends too much, or takes longer than 0.2 s.
        UnicodeDecodeError: It sends something else.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    content = bytearray()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(DEADLINE_S)
        stream.connect(str(path))
        while part := stream.recv(READ_BYTES):
            content += part
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or len(content) > MOST_BYTES:
                raise TimeoutError(f"{path} has no end")
            stream.settimeout(left_s)
    return content.decode()


def register(instance_id: str) -> None:
    """Shows the metrics of an engine's helpers in this process, in place of an earlier engine's."""
    collector = TierCollector(lambda: _sockets(instance_id))
    if _registered:
        REGISTRY.unregister(_registered.pop())
    REGISTRY.register(collector)
    _registered.append(collector)


_registered: list[TierCollector] = []


def _sockets(instance_id: str) -> Mapping[str, Path]:
    try:
        return metrics_sockets(instance_id)
    except ConfigError as error:
        _log.debug("no metrics: %s", error)
        return {}


def _like(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type)


def _add(to: Metric, family: Metric, engine: str) -> None:
    for sample in family.samples:
        to.samples.append(sample._replace(labels={**sample.labels, ENGINE_LABEL: engine}))


def _stat_logger_class() -> type:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase  # type: ignore[import-not-found]

    class TierStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
        """Records nothing: the tier's metrics are read at each scrape."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            if uses_tier(vllm_config):
                register(vllm_config.instance_id)

        def record(self, *args: Any, **kwargs: Any) -> None:
            """Does nothing."""

        def log_engine_initialized(self) -> None:
            """Does nothing."""

    return TierStatLogger


def __getattr__(name: str) -> type:
    if name == "TierStatLogger":
        return _stat_logger_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
