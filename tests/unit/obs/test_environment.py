"""Variables of other programs: OpenTelemetry's are honoured, prometheus-client's are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.obs.tracing import OFF, collector, open_tracing

E = "OTEL_EXPORTER_OTLP_"


def test_a_collector_is_found_in_the_variables_unless_it_takes_no_grpc() -> None:
    assert collector({}) == ""
    assert collector({f"{E}ENDPOINT": "http://all:4317"}) == "http://all:4317"
    assert collector({f"{E}ENDPOINT": "http://all:4317", f"{E}TRACES_ENDPOINT": "http://t:1"}) == "http://t:1"
    assert collector({f"{E}ENDPOINT": "http://all:4318", f"{E}PROTOCOL": "http/protobuf"}) == ""
    assert collector({f"{E}ENDPOINT": "http://all:4317", "OTEL_TRACES_EXPORTER": "none"}) == ""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({f"{E}COMPRESSION": "zstd"}, 'variables: Invalid value "zstd" for compression .*OTLP_COMPRESSION'),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "x"}, "variables: OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative"),
    ],
)
async def test_a_value_that_the_sdk_refuses_is_one_line(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        async with open_tracing("https://127.0.0.1:9", 1.0, role="gateway", replica_id="g"):
            pass


async def test_the_endpoint_of_the_variables_switches_traces_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"role": "gateway", "replica_id": "g"}
    async with open_tracing("", 1.0, **settings) as tracer:
        assert tracer is OFF
    monkeypatch.setenv(f"{E}ENDPOINT", "http://127.0.0.1:9")
    async with open_tracing("", 1.0, **settings) as tracer:
        assert tracer is not OFF


@pytest.mark.parametrize("folder", ["missing", "."])
def test_prometheus_folder_for_other_programs_is_not_used(folder: str, tmp_path: Path) -> None:
    """vLLM #49983: PROMETHEUS_MULTIPROC_DIR led to a missing folder."""
    program = (
        "from paceline.obs.metrics import Meter, service_registry; r = service_registry('gateway');"
        "Meter(r).counter('c', 'C.').inc(); print(r.get_sample_value('c_total'))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": "services", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout == "1.0\n"
    assert not list(tmp_path.iterdir())
