"""API keys: lines of a file, found by their hash, read again when the file changes."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.gateway.access.keys import ApiKey, KeyConfig, KeyRing, line_of, main, new_key, parse_keys

DIGEST = hashlib.sha256(b"secret").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


def write(path: Path, text: str, at: int) -> None:
    path.write_text(text)
    os.utime(path, (at, at))


def test_a_line_holds_a_name_a_hash_and_limits() -> None:
    digest = bytes.fromhex(DIGEST)
    assert parse_keys(f"# keys\n\n alice:{DIGEST}:60:4  # until June\n") == (
        ApiKey(name="alice", digest=digest, requests_per_minute=60, max_sessions=4),
    )
    assert parse_keys(f"alice:{DIGEST}::4") == (ApiKey(name="alice", digest=digest, max_sessions=4),)
    assert parse_keys(f"alice:{DIGEST}") == (ApiKey(name="alice", digest=digest),)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "must be name:sha256"),
        (f"alice:{DIGEST}:1:2:3", "got 5 fields"),
        (f":{DIGEST}", "the name must be"),
        (f"al ice:{DIGEST}", "the name must be"),
        ("alice:secret", "the hash must be 64 lower-case hex digits"),
        (f"alice:{DIGEST.upper()}", "the hash must be"),
        (f"alice:{DIGEST}:0", "requests-per-minute must be a whole number from 1 to 100000, got '0'"),
        (f"alice:{DIGEST}:many", "got 'many'"),
        (f"alice:{DIGEST}:1:-1", "max-sessions must be"),
        (f"bob:{OTHER}", "appears twice"),
        (f"eve:{DIGEST}", "appears twice"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: str, problem: str) -> None:
    text = f"bob:{DIGEST}\n# next\n{line}\n" if "twice" in problem else f"\n# next\n{line}\n"
    with pytest.raises(ConfigError, match=rf"--api-keys-file: line 3: .*{problem}"):
        parse_keys(text)


def test_a_key_in_the_place_of_its_hash_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys("alice:pl-secret")
    assert "pl-secret" not in str(caught.value)


def test_only_the_key_itself_is_found(tmp_path: Path) -> None:
    write(tmp_path / "keys", f"alice:{DIGEST}\nbob:{OTHER}\n", 1)
    ring = KeyRing(tmp_path / "keys")
    found = ring.find("secret")
    assert found is not None
    assert found.name == "alice"
    for stranger in ("", "Secret", "secret ", DIGEST, "alice", "\udcff"):
        assert ring.find(stranger) is None


def test_a_file_that_cannot_be_read_or_holds_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "empty").write_text("# none yet\n")
    for name, problem in (
        ("nowhere", r"nowhere cannot be read \(No such file"),
        ("binary", "is not UTF-8 text"),
        ("empty", "holds no key"),
    ):
        with pytest.raises(ConfigError, match=problem):
            KeyRing(tmp_path / name)


@pytest.mark.parametrize("broken", ["alice\n", "", None])
def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_old_keys_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = tmp_path / "keys"
    write(path, f"alice:{DIGEST}\n", 1)
    ring = KeyRing(path)
    if broken is None:
        path.unlink()
    else:
        write(path, broken, 2)
    with caplog.at_level(logging.INFO):
        ring.refresh()
        ring.refresh()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert ring.find("secret") is not None
        write(path, f"bob:{OTHER}\n", 3)
        assert ring.find("secret") is not None
        ring.refresh()
    assert caplog.records[-1].getMessage() == "API keys read again"
    assert (ring.find("secret"), ring.find("other") is not None, len(ring)) == (None, True, 1)


def test_the_command_prints_a_key_and_the_line_that_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["alice", "--max-sessions", "4"])
    shown, line = (printed.split()[-1] for printed in capsys.readouterr().out.splitlines())
    assert shown.startswith("pl-")
    [key] = parse_keys(line)
    assert key == ApiKey(name="alice", digest=hashlib.sha256(shown.encode()).digest(), max_sessions=4)


def test_a_name_that_no_line_could_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="--name must be"):
        main(["al:ice"])


def test_new_keys_are_long_and_all_different_and_a_line_holds_only_the_limits_that_are_given() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {46}
    assert line_of(KeyConfig(name="a"), "secret") == f"a:{DIGEST}"
    assert line_of(KeyConfig(name="a", requests_per_minute=5), "secret") == f"a:{DIGEST}:5"
