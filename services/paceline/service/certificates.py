"""Reads certificates from files, and refuses at start what would fail later, in words that say what to do.

It knows PEM and dates, and neither sockets nor services. Whether a certificate is the CA's is for the handshake to
find out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from paceline.core.errors import ConfigError


def read_pem(source: str, path: Path) -> bytes:
    """Returns the bytes of a file.

    Args:
        source: The flag that named it, for the error.
        path: The file.

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
        ConfigError: It cannot be read, holds no certificate, or one that is not valid at `now`.
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
        ConfigError: It cannot be read, is no key without a passphrase, or another certificate's.
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
    """Returns the DNS names that a certificate is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(extension.value.get_values_for_type(x509.DNSName))


def utc_now() -> datetime:
    """Returns the time that certificates are checked against."""
    return datetime.now(UTC)


def _date(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")
