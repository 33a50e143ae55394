"""Call permissions inside the fleet: mutual TLS between the tiers, or plain text without certificates.

Replicas are dialled by address and come and go, so certificates are for roles instead of addresses: that of a verifier
has the DNS name `verifier.paceline.internal` among its subject alternative names. A client requires the name of the
tier that it dials, a server that of the tier it serves. Bad files are refused at start, in words that say what to do;
the handshake checks whether a certificate is the CA's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from prometheus_client import CollectorRegistry, Gauge

from paceline.core.errors import ConfigError, PermissionDeniedError
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.service.interceptors import CheckInterceptor
from paceline.service.process import CHANNEL_OPTIONS

FLAG = "--tls-dir"
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "tls.pem", "tls.key"
# May query the health of every service, and nothing else.
PROBE = "probe"
ROLES = (GATEWAY, VERIFIER, DRAFTER, PROBE)
CLIENT_ROLE_OF: Mapping[str, str] = {VERIFIER: GATEWAY, DRAFTER: VERIFIER}

_SUBJECT_ALTERNATIVE_NAMES = "x509_subject_alternative_name"


def utc_now() -> datetime:
    """Returns the time that certificates are checked against."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTls:
    """Certificate and key of one service, and the CA that it trusts; all in PEM form."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    @classmethod
    def from_folder(cls, folder: Path, role: str, clock: Callable[[], datetime] = utc_now) -> Self:
        """Reads `ca.pem`, `tls.pem` (own certificate first, then intermediate ones) and `tls.key`.

        Args:
            role: The role that the certificate must be for.
            clock: Time at which the certificates must be valid.

        Raises:
            ConfigError: A file is missing, unreadable, expired or does not fit; names the file.
        """
        ca_pem, _ = read_certificates(FLAG, folder / CA_FILE, clock())
        certificate_pem, certificates = read_certificates(FLAG, folder / CERTIFICATE_FILE, clock())
        names = names_of(certificates[0])
        if role_name(role) not in names:
            raise ConfigError(
                f"{FLAG}: {folder / CERTIFICATE_FILE} is for {', '.join(sorted(names)) or 'no DNS name'}; "
                f"a {role}'s must have the subject alternative name {role_name(role)}"
            )
        key_pem = read_key(FLAG, folder / KEY_FILE, certificates[0])
        return cls(ca_pem=ca_pem, certificate_pem=certificate_pem, key_pem=key_pem)

    @property
    def files(self) -> Mapping[str, bytes]:
        """The certificates by the names of their files."""
        return {CA_FILE: self.ca_pem, CERTIFICATE_FILE: self.certificate_pem}

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials with which a server refuses clients without a certificate of the CA."""
        return grpc.ssl_server_credentials(
            [(self.key_pem, self.certificate_pem)], root_certificates=self.ca_pem, require_client_auth=True
        )


def load_tls(folder: Path | None, role: str) -> FleetTls | None:
    """Returns the certificates in a folder; None without a folder, which means plain text.

    Raises:
        ConfigError: See `FleetTls.from_folder`.
    """
    return None if folder is None else FleetTls.from_folder(folder, role)


def show_days_left(
    registry: CollectorRegistry, files: Mapping[str, bytes], clock: Callable[[], datetime] = utc_now
) -> None:
    """Shows how long certificates are valid: a service reads them at its start, and serves on when they end.

    Args:
        registry: Where it is shown.
        files: Certificates in PEM form, by a short name of their file.
        clock: The time at each scrape.
    """
    days_left = Gauge(
        "paceline:certificate_days_left",
        "Days until the first certificate of a file ends, as read at start; file: ca.pem, tls.pem or tls-cert.",
        ("file",),
        registry=registry,
    )
    for file, pem in files.items():
        end = min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(pem))
        days_left.labels(file).set_function(partial(_days_until, end, clock))


def _days_until(end: datetime, clock: Callable[[], datetime]) -> float:
    return (end - clock()) / timedelta(days=1)


def folder_of(tls_dir: Path | None, role: str) -> Path | None:
    """Returns the folder of a role's certificate: the one named like the role if it exists, or `tls_dir` itself."""
    if tls_dir is None or not (tls_dir / role).is_dir():
        return tls_dir
    return tls_dir / role


def role_name(role: str) -> str:
    """Returns the DNS name in the certificates of a role."""
    return f"{role}.paceline.internal"


def channel(
    address: str,
    *,
    tls: FleetTls | None,
    role: str,
    options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS,
) -> grpc.aio.Channel:
    """Opens a channel to a service of the fleet; dials nothing yet.

    Args:
        address: Where it listens, `host:port`.
        tls: Own certificate; None: plain text.
        role: The role whose certificate the service must show.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca_pem, private_key=tls.key_pem, certificate_chain=tls.certificate_pem
    )
    named = (*options, ("grpc.ssl_target_name_override", role_name(role)))
    return grpc.aio.secure_channel(address, credentials, options=named)


def only_for(role: str) -> CheckInterceptor:
    """Returns an interceptor that refuses callers with certificates of other roles; health is open to all."""
    wanted = role_name(role)

    async def check(context: Any) -> None:
        names = context.auth_context().get(_SUBJECT_ALTERNATIVE_NAMES, ())
        if wanted.encode() not in names:
            shown = b", ".join(names).decode(errors="replace")
            raise PermissionDeniedError(
                f"this call is for {wanted}, the caller's certificate is for {shown or 'nobody'}"
            )

    return CheckInterceptor(check)


def read_pem(source: str, path: Path) -> bytes:
    """Returns the bytes of a file.

    Args:
        source: The flag that named it, for the error.

    Raises:
        ConfigError: It is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: {path} cannot be read ({error.strerror}); it must be a PEM file") from None


def read_certificates(source: str, path: Path, now: datetime) -> tuple[bytes, list[x509.Certificate]]:
    """Returns the PEM bytes of a file and the certificates in it, the first one being the owner's.

    Raises:
        ConfigError: It cannot be read, or holds no certificate, or one that is not valid at `now`.
    """
    pem = read_pem(source, path)
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(f"{source}: {path} holds no certificate in PEM form") from None
    for certificate in certificates:
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > end:
            raise ConfigError(f"{source}: {path} has expired on {_date(end)}; put a new certificate in its place")
        if now < start:
            raise ConfigError(f"{source}: {path} is valid from {_date(start)} on only; is this machine's clock right?")
    return pem, certificates


def read_key(source: str, path: Path, certificate: x509.Certificate) -> bytes:
    """Returns the PEM bytes of the private key of a certificate.

    Raises:
        ConfigError: It cannot be read, is not a key without a passphrase, or belongs to another certificate.
    """
    pem = read_pem(source, path)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{source}: {path} holds no private key in PEM form without a passphrase") from None
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if own != certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
        raise ConfigError(f"{source}: {path} is not the key of the certificate beside it; both must be of one pair")
    return pem


def names_of(certificate: x509.Certificate) -> frozenset[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(extension.value.get_values_for_type(x509.DNSName))


def _date(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")
