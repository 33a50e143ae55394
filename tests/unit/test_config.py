"""Settings: flags, environment, limits and the words in which a refusal comes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core.errors import ConfigError
from paceline.drafter.config import DrafterConfig
from paceline.service.config import (
    as_called,
    from_mapping,
    load,
    loggable,
    parse,
    parse_cpus,
    public_url,
    setting,
)
from paceline.verifier.config import VerifierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig:
    port: int = setting(8101, help="Port to listen on.", low=0, high=65535)
    wait_s: float = setting(1.5, help="Longest wait.", unit="seconds", low=0.0)
    model: Path | None = setting(None, help="Checkpoint folder.")
    folders: tuple[Path, ...] = setting((), help="Tokenizer folders.")
    dtype: str = setting("bfloat16", help="Type of the weights.", choices=("float32", "bfloat16"))
    eager: bool = setting(False, help="100 % eager.")
    redis_url: str = setting("memory://", help="Where the registry is.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedyConfig:
    model: Path = setting(help="Checkpoint folder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherConfig(ExampleConfig):
    port: int = 8201


def load_example(*argv: str, **environ: str) -> ExampleConfig:
    return load(ExampleConfig, argv, environ, "example", "An example.")


def test_defaults_stand_where_nothing_is_given() -> None:
    assert load_example() == ExampleConfig()


def test_a_subclass_may_have_another_default_of_the_same_limits() -> None:
    assert load(OtherConfig, [], {}, "other", "") == OtherConfig(port=8201)
    with pytest.raises(ConfigError, match="--port must be a whole number from 0 to 65535, got '70000'"):
        load(OtherConfig, ["--port", "70000"], {}, "other", "")


def test_flags_are_the_field_names_in_kebab_case() -> None:
    config = load_example("--port", "9", "--wait-s", "0.25", "--model", "here", "--eager", "--dtype", "float32")
    assert config == ExampleConfig(port=9, wait_s=0.25, model=Path("here"), eager=True, dtype="float32")


def test_a_repeated_flag_becomes_a_tuple() -> None:
    assert load_example("--folders", "a", "--folders", "b").folders == (Path("a"), Path("b"))


def test_the_environment_is_read_with_our_prefix() -> None:
    config = load_example(PACELINE_PORT="7", PACELINE_EAGER="yes", PACELINE_FOLDERS="a,b", PORT="8")
    assert config == ExampleConfig(port=7, eager=True, folders=(Path("a"), Path("b")))


def test_a_flag_wins_over_the_environment() -> None:
    assert load_example("--port", "9", PACELINE_PORT="7").port == 9
    assert load_example("--no-eager", PACELINE_EAGER="true").eager is False


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_example(PACELINE_PORT="").port == 8101


def test_a_section_of_a_file_holds_field_names_and_values() -> None:
    values = {"port": 9, "wait_s": 2, "model": "here", "folders": ["a", "b"], "eager": True}
    assert from_mapping(ExampleConfig, values, "") == ExampleConfig(
        port=9, wait_s=2.0, model=Path("here"), folders=(Path("a"), Path("b")), eager=True
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prot": 1}, "here.prot is no setting; there are port, wait_s, model, folders, dtype, eager, redis_url"),
        ({"port": 70000}, "here.port must be a whole number from 0 to 65535, got '70000'"),
        ({"port": 1.5}, "here.port must be a whole number from 0 to 65535, got '1.5'"),
        ({"port": True}, "here.port must be a whole number from 0 to 65535, got 'True'"),
        ({"port": [1]}, "here.port must be a whole number from 0 to 65535, got [1]"),
        ({"port": None}, "here.port must be a whole number from 0 to 65535, got 'None'"),
        ({"folders": "a"}, "here.folders must be a list, got 'a'"),
        ({"folders": [None]}, "here.folders must be a path, got '[None]'"),
        ({"eager": "perhaps"}, "here.eager must be true or false, got 'perhaps'"),
    ],
)
def test_a_bad_value_in_a_file_is_refused_with_its_name_and_limit(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(ExampleConfig, values, "here.")
    assert str(caught.value) == message


def test_a_setting_without_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"--model is required \(or set PACELINE_MODEL\)"):
        load(NeedyConfig, [], {}, "needy", "Needs a model.")
    with pytest.raises(ConfigError, match=r"^here\.model is required: Checkpoint folder\.$"):
        from_mapping(NeedyConfig, {}, "here.")


def test_a_bad_flag_or_variable_is_refused_with_name_value_and_limit() -> None:
    for argv, environ, message in (
        (["--port", "70000"], {}, "--port must be a whole number from 0 to 65535, got '70000'"),
        (["--port", "x"], {}, "--port must be a whole number from 0 to 65535, got 'x'"),
        (["--wait-s", "nan"], {}, "--wait-s must be a number of seconds, at least 0, got 'nan'"),
        (["--wait-s", "-1"], {}, "--wait-s must be a number of seconds, at least 0, got '-1'"),
        (["--dtype", "int8"], {}, "--dtype must be one of float32, bfloat16, got 'int8'"),
        (["--prot", "1"], {}, "unrecognized arguments: --prot 1, did you mean --port? (see "),
        (["--nothing-like-it"], {}, "unrecognized arguments: --nothing-like-it (see "),
        (["--por", "1"], {}, "unrecognized arguments: --por 1"),
        ([], {"PACELINE_EAGER": "perhaps"}, "PACELINE_EAGER must be true or false, got 'perhaps'"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_example(*argv, **environ)
        assert message in str(caught.value)


def test_a_bad_setting_ends_the_process_in_one_line_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(ExampleConfig, ["--port", "x"], {}, "example", "An example.")
    assert caught.value.code == 2
    assert capsys.readouterr().err == ("example: error: --port must be a whole number from 0 to 65535, got 'x'\n")


def test_help_names_default_limit_unit_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_example("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Longest wait. [a number of seconds, at least 0; default: 1.5; PACELINE_WAIT_S]" in text
    assert "100 % eager." in text


def test_passwords_never_reach_the_log() -> None:
    config = ExampleConfig(redis_url="redis://user:secret@example:6379/2")
    assert loggable(config)["redis_url"] == "redis://example:6379/2"
    assert public_url("redis://:secret@[::1]:6379/0?password=x") == "redis://[::1]:6379/0"


@pytest.mark.parametrize("config_class", [DrafterConfig, VerifierConfig])
def test_services_refuse_a_bad_announcement_before_they_load_anything(config_class: type) -> None:
    assert load(config_class, ["--model", "m", "--announce", "here:8201"], {}, "example", "").announce == "here:8201"
    with pytest.raises(ConfigError, match="--announce must be host:port"):
        load(config_class, ["--model", "m"], {"PACELINE_ANNOUNCE": "here"}, "example", "")


@pytest.mark.parametrize(("text", "cpus"), [("3", {3}), ("4-6,1", {1, 4, 5, 6}), (" 0 , 2-2", {0, 2})])
def test_cpus_are_lists_and_ranges(text: str, cpus: set[int]) -> None:
    assert parse_cpus("--cpus", text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "1,,2", "-1", "1-2-3"])
def test_other_text_is_refused_as_cpus(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus must be a list of CPUs"):
        parse_cpus("--cpus", text)


@pytest.mark.parametrize(
    ("module", "command", "name"),
    [
        ("paceline.__main__", "paceline up", "python -m paceline up"),
        ("paceline.gateway.__main__", "paceline gateway", "python -m paceline.gateway"),
        ("pytest", "paceline drain", "paceline drain"),
    ],
)
def test_messages_name_a_module_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, module: str, command: str, name: str
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=module))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert as_called(command) == name


def test_a_program_on_the_search_path_is_named_alone_and_another_one_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "paceline"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_called("paceline up") == "paceline up"
    monkeypatch.setenv("PATH", "/nowhere")
    assert as_called("paceline up") == f"{program} up"
