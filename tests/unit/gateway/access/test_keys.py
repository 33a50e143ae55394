"""API keys: lines of a file, found by their hash, read again when the file changes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.gateway.access.keys import ApiKey, KeyConfig, KeyRing, line_of, main, new_key, parse_keys

DIGEST = hashlib.sha256(b"secret").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


def write(path: Path, text: str, at: int) -> None:
    path.write_text(text)
    os.utime(path, (at, at))


def keys_of(text: str) -> tuple[ApiKey, ...]:
    keys, problems = parse_keys(text)
    assert not problems
    return tuple(keys.values())


def problem_of(text: str) -> str:
    _, [problem] = parse_keys(text)
    return str(problem)


def test_a_line_holds_a_name_a_hash_and_limits() -> None:
    digest = bytes.fromhex(DIGEST)
    assert keys_of(f"# keys\n\n alice:{DIGEST}:60:4  # until June\n") == (
        ApiKey(name="alice", digest=digest, requests_per_minute=60, max_sessions=4),
    )
    assert keys_of(f"alice:{DIGEST}::4") == (ApiKey(name="alice", digest=digest, max_sessions=4),)
    assert keys_of(f"alice:{DIGEST}") == (ApiKey(name="alice", digest=digest),)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "must be name:sha256"),
        (f"alice:{DIGEST}:1:2:3", "got 5 fields"),
        (f":{DIGEST}", "the name must be"),
        (f"al ice:{DIGEST}", "the name must be"),
        ("alice:secret", "the hash must be 64 lower-case hex digits"),
        (f"alice:{DIGEST.upper()}", "the hash must be"),
        (f"alice:{DIGEST}:0", "requests-per-minute must be a whole number from 1 to 100000"),
        (f"alice:{DIGEST}:many", "requests-per-minute must be"),
        (f"alice:{DIGEST}:1:-1", "max-sessions must be"),
        (f"bob:{OTHER}", "appears twice"),
        (f"eve:{DIGEST}", "appears twice"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: str, problem: str) -> None:
    text = f"bob:{DIGEST}\n# next\n{line}\n" if "twice" in problem else f"\n# next\n{line}\n"
    assert re.match(rf"--api-keys-file: line 3: .*{problem}", problem_of(text))


@pytest.mark.parametrize("line", ["alice:pl-secret", "pl-secret", f"alice:{DIGEST}:pl-secret"])
def test_a_key_in_a_wrong_place_is_not_shown(line: str) -> None:
    assert "secret" not in problem_of(line)


def test_sixteen_thousand_keys_are_read_at_once_and_found_at_once() -> None:
    """Reading was quadratic: 3.9 s; 16 times as many lines may not take 16 * 16 times as long."""
    lines = [f"key{index}:{hashlib.sha256(str(index).encode()).hexdigest()}" for index in range(16_000)]

    def seconds(num_lines: int) -> float:
        started_s = time.process_time()
        assert len(keys_of("\n".join(lines[:num_lines]))) == num_lines
        return time.process_time() - started_s

    assert min(seconds(16_000) for _ in range(3)) < 64 * max(0.002, min(seconds(1_000) for _ in range(3)))


def test_only_the_key_itself_is_found(tmp_path: Path) -> None:
    write(tmp_path / "keys", f"alice:{DIGEST}\nbob:{OTHER}\n", 1)
    ring = KeyRing(tmp_path / "keys")
    found = ring.find("secret")
    assert found is not None
    assert found.name == "alice"
    for stranger in ("", "Secret", "secret ", DIGEST, "alice", "\udcff"):
        assert ring.find(stranger) is None


def test_a_file_that_cannot_be_read_or_holds_no_key_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "empty").write_text("# none yet\n")
    for name, problem in (
        ("nowhere", r"nowhere cannot be read \(No such file"),
        ("binary", "line 1: must be name"),
        ("empty", "holds no key"),
    ):
        with pytest.raises(ConfigError, match=problem):
            KeyRing(tmp_path / name)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    """The keys of alice and bob."""
    write(tmp_path / "keys", f"alice:{DIGEST}\nbob:{OTHER}\n", 1)
    return KeyRing(tmp_path / "keys")


@pytest.mark.parametrize(
    ("text", "found", "problem"),
    [
        (f"alice\nbob:{OTHER}\n", (False, True), "line 1: must be"),
        (f"# alice:{DIGEST}\nbob:{OTHER}\ncarol:\n", (False, True), "line 3: the hash must be"),
        (f"bob:{OTHER}\nbob:{DIGEST}\n", (False, True), "line 2: the name or the key appears twice"),
        ("", (False, False), "holds no key"),
        ("\x00\n", (False, False), "line 1: must be"),
        ("a\nb\nc\n", (False, False), r"line 1: must be .* \(and 2 more\)"),
        (None, (False, False), "cannot be read"),
    ],
)
def test_a_key_whose_line_is_gone_is_gone_whatever_else_is_wrong_with_the_file(
    tmp_path: Path,
    ring: KeyRing,
    caplog: pytest.LogCaptureFixture,
    text: str | None,
    found: tuple[bool, bool],
    problem: str,
) -> None:
    """A broken or missing file left all old keys in force, a stolen one too."""
    if text is None:
        (tmp_path / "keys").unlink()
    else:
        write(tmp_path / "keys", text, 2)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            ring.refresh()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (ring.find("secret") is not None, ring.find("other") is not None) == found
    assert len(ring) == sum(found)
    assert re.search(problem, ring.problem)
    assert ring.num_problems == (3 if "more" in problem else 1)


def test_a_file_that_is_whole_again_is_wholly_in_force(
    tmp_path: Path, ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "keys", "alice\n", 2)
    ring.refresh()
    caplog.clear()
    write(tmp_path / "keys", f"alice:{DIGEST}\n", 3)
    with caplog.at_level(logging.INFO):
        ring.refresh()
    assert [record.getMessage() for record in caplog.records] == ["API keys read again"]
    assert (ring.problem, ring.num_problems, len(ring)) == ("", 0, 1)
    assert ring.find("secret") is not None


def test_a_file_that_could_not_be_read_for_a_while_is_read_again_though_it_is_the_same(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*_: object, **__: object) -> str:
        raise OSError(5, "Input/output error")

    write(tmp_path / "keys", f"alice:{DIGEST}\n", 2)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", failing)
        ring.refresh()
        assert (len(ring), "Input/output error" in ring.problem) == (0, True)
    ring.refresh()
    assert (len(ring), ring.problem) == (1, "")


def test_the_command_prints_a_key_and_the_line_that_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["alice", "--max-sessions", "4"])
    shown, line = (printed.split()[-1] for printed in capsys.readouterr().out.splitlines())
    assert shown.startswith("pl-")
    [key] = keys_of(line)
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
