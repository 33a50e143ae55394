"""`paceline dev-ca`: a certificate authority and a certificate a role, to try mutual TLS with.

The authority's key is never written: a set of certificates is made once and cannot be added to.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.certificates import utc_now
from paceline.config import parse, setting
from paceline.core.errors import ConfigError
from paceline.core.messages import GATEWAY
from paceline.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, ROLES, role_name

PROG = "paceline dev-ca"
DESCRIPTION = (
    "Makes a certificate authority and certificates for gateway, verifier, drafter and probes in DIR, which may stand "
    "first on the command line without a flag. For development, not for production: there, certificates come from "
    "an authority that can renew and revoke them."
)
LIFETIME = timedelta(days=30)
# A neighbour whose clock is behind shall not find them valid in the future only.
CLOCK_SKEW = timedelta(minutes=5)
KEY_MODE, FILE_MODE = 0o600, 0o644
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevCaConfig:
    """Settings of `paceline dev-ca`."""

    dir: Path = setting(help="Folder to make; one that is there must be empty.")
    host: tuple[str, ...] = setting((), help="Another host name or address that clients reach the gateway at.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline dev-ca`."""
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--dir={arguments[0]}"
    config = parse(DevCaConfig, arguments, os.environ, PROG, DESCRIPTION)
    make_certificates(config.dir, config.host)
    sys.stdout.write(_next_steps(config.dir))


def make_certificates(folder: Path, hosts: Sequence[str] = (), clock: Callable[[], datetime] = utc_now) -> None:
    """Writes `ca.pem`, and a folder with `ca.pem`, `tls.pem` and `tls.key` for each role.

    Args:
        folder: Is made.
        hosts: Names and addresses of the gateway, besides those of this machine itself.
        clock: Time that the certificates begin at.

    Raises:
        ConfigError: The folder holds something, or cannot be written.
    """
    now = clock()
    authority = _new_authority(now)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and nothing is overwritten; name a new folder")
        ca_pem = authority.certificate.public_bytes(Encoding.PEM)
        _write(folder / CA_FILE, ca_pem, FILE_MODE)
        for role in ROLES:
            names = [role_name(role), *((*LOCAL_HOSTS, *hosts) if role == GATEWAY else ())]
            key, certificate = _issued(authority, names, now)
            (folder / role).mkdir()
            _write(folder / role / CA_FILE, ca_pem, FILE_MODE)
            _write(folder / role / CERTIFICATE_FILE, certificate.public_bytes(Encoding.PEM), FILE_MODE)
            key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            _write(folder / role / KEY_FILE, key_pem, KEY_MODE)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); name another folder") from None


def _new_authority(now: datetime) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Paceline development CA")
    certificate = (
        _builder(now)
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Authority(certificate=certificate, key=key)


def _issued(
    authority: _Authority, names: Sequence[str], now: datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(now)
        .subject_name(_name(names[0]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return key, certificate


def _builder(now: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigError(f"--host must be a host name in ASCII or an IP address, got {name!r}") from None


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _next_steps(folder: Path) -> str:
    lines = [
        f"{folder} holds certificates for {LIFETIME.days} days, for development only.",
        "",
        "A whole fleet on this machine with mutual TLS between its tiers and TLS at its doors:",
        f"  paceline up --tls-dir {folder} --tls-cert {folder / GATEWAY / CERTIFICATE_FILE} "
        f"--tls-key {folder / GATEWAY / KEY_FILE}",
        "Single services, each with the folder of its role only:",
        f"  paceline verifier --tls-dir {folder / 'verifier'} ...",
        "A client:",
        f"  curl --cacert {folder / CA_FILE} https://127.0.0.1:8000/health",
        f"  paceline generate --url https://127.0.0.1:8000 --ca-file {folder / CA_FILE} ...",
    ]
    return "\n".join(lines) + "\n"
