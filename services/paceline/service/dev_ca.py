"""`paceline dev-ca`: a certificate authority and a certificate a role, to try mutual TLS with.

The authority's key is never written, so no certificate can be added to a set later. The certificates of the roles
expire; that of the authority does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import trustme

from paceline.core.errors import ConfigError
from paceline.core.messages import GATEWAY
from paceline.service.config import as_called, parse, setting
from paceline.service.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, ROLES, role_name, utc_now

PROG = "paceline dev-ca"
DESCRIPTION = (
    "Makes a certificate authority and certificates for gateway, verifier, drafter and probes in DIR, which may stand "
    "first on the command line without a flag. For development, not for production: there, certificates come from "
    "an authority that can renew and revoke them."
)
ORGANIZATION = "Paceline development"
LIFETIME = timedelta(days=30)
# A neighbour's clock may be behind.
CLOCK_SKEW = timedelta(minutes=5)
KEY_MODE, FILE_MODE = 0o600, 0o644
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevCaConfig:
    dir: Path = setting(help="Folder to make; one that is there must be empty.")
    host: tuple[str, ...] = setting((), help="Another host name or address that clients reach the gateway at.")


def main(argv: Sequence[str]) -> None:
    config = parse(DevCaConfig, argv, os.environ, PROG, DESCRIPTION, first="dir")
    make_certificates(config.dir, config.host)
    sys.stdout.write(_next_steps(config.dir))


def make_certificates(folder: Path, hosts: Sequence[str] = (), clock: Callable[[], datetime] = utc_now) -> None:
    """Writes `ca.pem`, and a folder with `ca.pem`, `tls.pem` and `tls.key` for each role.

    Args:
        hosts: Names and addresses of the gateway, besides those of this machine itself.
        clock: Time that the certificates begin at.

    Raises:
        ConfigError: The folder holds something, or cannot be written.
    """
    authority = trustme.CA(organization_name=ORGANIZATION)
    ca_pem = authority.cert_pem.bytes()
    now = clock()
    issued = {role: _issued(authority, role, (*LOCAL_HOSTS, *hosts) if role == GATEWAY else (), now) for role in ROLES}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and nothing is overwritten; name a new folder")
        _write(folder / CA_FILE, ca_pem, FILE_MODE)
        for role, own in issued.items():
            (folder / role).mkdir()
            _write(folder / role / CA_FILE, ca_pem, FILE_MODE)
            _write(folder / role / CERTIFICATE_FILE, own.cert_chain_pems[0].bytes(), FILE_MODE)
            _write(folder / role / KEY_FILE, own.private_key_pem.bytes(), KEY_MODE)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); name another folder") from None


def _issued(authority: trustme.CA, role: str, hosts: Sequence[str], now: datetime) -> trustme.LeafCert:
    try:
        return authority.issue_cert(
            *(role_name(role), *hosts),
            common_name=role_name(role),
            organization_name=ORGANIZATION,
            not_before=now - CLOCK_SKEW,
            not_after=now + LIFETIME,
        )
    except ValueError as error:
        raise ConfigError(f"--host must be a host name or an IP address, got {', '.join(hosts)}: {error}") from None


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _next_steps(folder: Path) -> str:
    lines = [
        f"{folder} holds certificates for {LIFETIME.days} days, for development only.",
        "",
        "A whole fleet on this machine with mutual TLS between its tiers and TLS at its doors:",
        f"  {as_called('paceline up')} --tls-dir {folder} --tls-cert {folder / GATEWAY / CERTIFICATE_FILE} "
        f"--tls-key {folder / GATEWAY / KEY_FILE}",
        "Single services, each with the folder of its role only:",
        f"  {as_called('paceline verifier')} --tls-dir {folder / 'verifier'} ...",
        "A client:",
        f"  curl --cacert {folder / CA_FILE} https://127.0.0.1:8000/health",
        f"  {as_called('paceline generate')} --url https://127.0.0.1:8000 --ca-file {folder / CA_FILE} ...",
    ]
    return "\n".join(lines) + "\n"
