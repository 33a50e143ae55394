"""Certificates from files: read when they fit, refused at start in words that say what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.errors import ConfigError
from paceline.core.messages import GATEWAY, VERIFIER
from paceline.service.credentials import ROLES, FleetTls, folder_of, load_tls, show_days_left
from paceline.service.dev_ca import LIFETIME, main, make_certificates

NOW = datetime(2030, 5, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca") / "dev"
    make_certificates(folder, clock=lambda: NOW)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The verifier's certificate, to be spoilt."""
    return Path(shutil.copytree(made / VERIFIER, tmp_path / VERIFIER))


def read(folder: Path, role: str = VERIFIER, at: datetime = NOW) -> FleetTls:
    return FleetTls.from_folder(folder, role, lambda: at)


@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_read_what_the_development_ca_made(made: Path, role: str) -> None:
    tls = read(made / role, role)
    assert tls.ca_pem == (made / "ca.pem").read_bytes()
    assert tls.key_pem not in repr(tls).encode()


@pytest.mark.parametrize("name", ["ca.pem", "tls.pem", "tls.key"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"--tls-dir: .*{re.escape(name)} cannot be read \(No such file"):
        read(folder)


@pytest.mark.parametrize(
    ("name", "problem"), [("ca.pem", "no certificate"), ("tls.pem", "no certificate"), ("tls.key", "no private key")]
)
def test_a_file_that_holds_something_else_is_named(folder: Path, name: str, problem: str) -> None:
    (folder / name).write_text("-----BEGIN NONSENSE-----\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} holds {problem}"):
        read(folder)


@pytest.mark.parametrize("name", ["ca.pem", "tls.pem"])
def test_an_expired_certificate_is_named_with_its_date(folder: Path, made: Path, tmp_path: Path, name: str) -> None:
    make_certificates(tmp_path / "old", clock=lambda: NOW - timedelta(days=100))
    shutil.copy(tmp_path / "old" / VERIFIER / "tls.pem", folder / name)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} has expired on 2030-02-20 00:00 UTC"):
        read(folder)


def test_certificates_are_valid_for_thirty_days(made: Path) -> None:
    read(made / VERIFIER, at=NOW + LIFETIME)
    with pytest.raises(ConfigError, match="expired on 2030-05-31"):
        read(made / VERIFIER, at=NOW + LIFETIME + timedelta(seconds=1))


def test_a_certificate_of_the_future_hints_at_the_clock(folder: Path) -> None:
    with pytest.raises(ConfigError, match="valid from 2030-04-30 23:55 UTC on only; is this machine's clock right"):
        read(folder, at=NOW - timedelta(days=1))


def test_the_key_of_another_certificate_is_refused(folder: Path, made: Path) -> None:
    shutil.copy(made / GATEWAY / "tls.key", folder / "tls.key")
    with pytest.raises(ConfigError, match=r"tls\.key is not the key of the certificate beside it"):
        read(folder)


def test_a_certificate_of_another_role_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is for verifier\.paceline\.internal; a drafter's must have .* drafter\.pac"
    ):
        read(folder, "drafter")


def test_every_scrape_shows_how_many_days_the_first_certificate_of_a_file_has_left(made: Path) -> None:
    """The second audit: neither a metric nor an alert said when certificates end."""
    registry, now = CollectorRegistry(), NOW

    def days_left(file: str) -> float | None:
        return registry.get_sample_value("paceline:certificate_days_left", {"file": file})

    later = made.parent / "later"
    make_certificates(later, clock=lambda: NOW + timedelta(days=10))
    tls = read(made / VERIFIER)
    chain = tls.certificate_pem + (later / VERIFIER / "tls.pem").read_bytes()
    show_days_left(registry, {**tls.files, "tls-cert": chain}, lambda: now)
    assert days_left("tls.pem") == days_left("tls-cert") == LIFETIME.days
    now += timedelta(days=20, hours=12)
    assert days_left("tls.pem") == LIFETIME.days - 20.5


def test_without_a_folder_there_are_no_certificates() -> None:
    assert load_tls(None, VERIFIER) is None


def test_a_role_finds_its_own_folder_or_the_one_of_all(made: Path, folder: Path) -> None:
    assert folder_of(made, GATEWAY) == made / GATEWAY
    assert folder_of(folder, GATEWAY) == folder
    assert folder_of(None, GATEWAY) is None


def test_keys_are_their_owners_alone_and_the_authoritys_is_nowhere(made: Path) -> None:
    keys = [path for path in made.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]
    assert sorted(keys) == sorted(made / role / "tls.key" for role in ROLES)
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def refusal_of(action: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        action()
    return str(caught.value) + capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note").write_text("mine")
    assert "is not empty" in refusal_of(lambda: main([str(tmp_path)]), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_the_command_says_what_to_do_next_and_that_it_is_for_development(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path / "ca"), "--host", "10.0.0.7", "--host", "front.example"])
    assert f"paceline up --tls-dir {tmp_path / 'ca'}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "not for production" in " ".join(capsys.readouterr().out.split())


def test_a_host_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--host must be" in refusal_of(lambda: main([str(tmp_path / "ca"), "--host", "two words"]), capsys)
    assert not (tmp_path / "ca").exists()
