"""OpenTelemetry's variables: honoured, or refused by name before the SDK or gRPC fails over them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.errors import ConfigError
from paceline.obs.collector_environment import check, collector
from paceline.obs.tracing import OFF, open_tracing
from paceline.service.dev_ca import make_certificates

E = "OTEL_EXPORTER_OTLP_"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "ca"
    make_certificates(folder)
    return folder


def test_a_collector_is_found_in_the_variables_unless_it_takes_no_grpc() -> None:
    assert collector({}) == ""
    assert collector({f"{E}ENDPOINT": "http://all:4317"}) == "http://all:4317"
    assert collector({f"{E}ENDPOINT": "http://all:4317", f"{E}TRACES_ENDPOINT": "http://t:1"}) == "http://t:1"
    assert collector({f"{E}ENDPOINT": "http://all:4318", f"{E}PROTOCOL": "http/protobuf"}) == ""
    assert collector({f"{E}ENDPOINT": "http://all:4317", "OTEL_TRACES_EXPORTER": "none"}) == ""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({f"{E}CERTIFICATE": "/nope"}, r"OTEL_EXPORTER_OTLP_CERTIFICATE /nope: cannot be read \(No such file"),
        ({f"{E}TRACES_CERTIFICATE": "{ca}/gateway"}, r"OTLP_TRACES_CERTIFICATE .*: cannot be read \(Is a directory"),
        ({f"{E}CERTIFICATE": "{ca}/gateway/tls.key"}, r"OTLP_CERTIFICATE .*tls.key: is not PEM that can be used"),
        ({f"{E}CLIENT_CERTIFICATE": "{ca}/gateway/tls.pem"}, "OTLP_CLIENT_CERTIFICATE and .*CLIENT_KEY go together"),
        (
            {f"{E}CLIENT_CERTIFICATE": "{ca}/gateway/tls.pem", f"{E}CLIENT_KEY": "{ca}/verifier/tls.key"},
            "OTLP_CLIENT_CERTIFICATE .*tls.pem with OTEL_EXPORTER_OTLP_CLIENT_KEY .*tls.key: is not PEM",
        ),
        ({f"{E}TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT must be a number of seconds, got 'soon'"),
        ({f"{E}COMPRESSION": "zstd"}, 'variables: Invalid value "zstd" for compression .*OTLP_COMPRESSION'),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "x"}, "variables: OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative"),
    ],
)
async def test_a_value_that_cannot_be_used_is_named(
    variables: dict[str, str], said: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("{ca}", str(certificates)))
    with pytest.raises(ConfigError, match=said):
        async with open_tracing(
            "https://127.0.0.1:9", 1.0, role="gateway", replica_id="g", registry=CollectorRegistry()
        ):
            pass


def test_certificates_that_fit_are_taken(certificates: Path) -> None:
    own = certificates / "gateway"
    check(
        {
            f"{E}CERTIFICATE": str(certificates / "ca.pem"),
            f"{E}CLIENT_CERTIFICATE": str(own / "tls.pem"),
            f"{E}CLIENT_KEY": str(own / "tls.key"),
        }
    )


async def test_the_endpoint_of_the_variables_switches_traces_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"role": "gateway", "replica_id": "g"}
    async with open_tracing("", 1.0, registry=CollectorRegistry(), **settings) as tracer:
        assert tracer is OFF
    monkeypatch.setenv(f"{E}ENDPOINT", "http://127.0.0.1:9")
    async with open_tracing("", 1.0, registry=CollectorRegistry(), **settings) as tracer:
        assert tracer is not OFF


@pytest.mark.parametrize("folder", ["missing", "."])
def test_prometheus_folder_for_other_programs_is_not_used(folder: str, tmp_path: Path) -> None:
    """vLLM #49983: PROMETHEUS_MULTIPROC_DIR led to a missing folder."""
    program = (
        "from paceline.obs.families import Meter, service_registry; r = service_registry('gateway');"
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
