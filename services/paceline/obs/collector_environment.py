"""OpenTelemetry's own variables, checked before its SDK reads them.

The SDK passes over a certificate that it cannot read, and gRPC ends the process over a client certificate without its
key.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.core.errors import ConfigError

PREFIX: Final = "OTEL_EXPORTER_OTLP_"
# Of traces alone; each wins over the general one.
TRACES: Final = f"{PREFIX}TRACES_"
GRPC: Final = "grpc"
# Of the setting that names another endpoint.
ENDPOINT_HELP: Final = (
    "OTLP collector that takes traces over gRPC, http://host:port or https://host:port; empty: the one in "
    f"{PREFIX}ENDPOINT, or no traces."
)


def collector(environ: Mapping[str, str]) -> str:
    """The endpoint that the variables name for traces; empty: none, or one that takes no gRPC."""
    protocol = environ.get(f"{TRACES}PROTOCOL") or environ.get(f"{PREFIX}PROTOCOL") or GRPC
    named = environ.get(f"{TRACES}ENDPOINT") or environ.get(f"{PREFIX}ENDPOINT") or ""
    return named if protocol == GRPC and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" else ""


def check(environ: Mapping[str, str]) -> None:
    """Checks the values that the SDK would fail over without their names.

    Raises:
        ConfigError: One is wrong; names the variable, the value and what is needed.
    """
    for name in (f"{TRACES}TIMEOUT", f"{PREFIX}TIMEOUT"):
        try:
            float(environ.get(name) or 0)
        except ValueError:
            raise ConfigError(f"{name} must be a number of seconds, got {environ[name]!r}") from None
    # The SDK takes all three of one kind.
    prefix = TRACES if environ.get(f"{TRACES}CERTIFICATE") is not None else PREFIX
    authority, certificate, key = (
        _file(environ, f"{prefix}{name}") for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    )
    if (certificate is None) != (key is None):
        raise ConfigError(f"{prefix}CLIENT_CERTIFICATE and {prefix}CLIENT_KEY go together; set both or neither")
    context = ssl.create_default_context()
    if authority is not None:
        with _pem(f"{prefix}CERTIFICATE {authority}"):
            context.load_verify_locations(authority)
    if certificate is not None:
        with _pem(f"{prefix}CLIENT_CERTIFICATE {certificate} with {prefix}CLIENT_KEY {key}"):
            context.load_cert_chain(certificate, key)


def _file(environ: Mapping[str, str], name: str) -> Path | None:
    given = environ.get(name)
    if given is None:
        return None
    try:
        Path(given).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {given}: cannot be read ({error.strerror})") from error
    return Path(given)


@contextmanager
def _pem(what: str) -> Iterator[None]:
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{what}: is not PEM that can be used ({error})") from error
