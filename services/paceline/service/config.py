"""Turns one frozen dataclass per service into flags and environment variables, and these into an instance.

A flag `--max-num-seqs` is also read from `PACELINE_MAX_NUM_SEQS`; the flag wins. Each service declares its own
dataclass, with defaults and limits beside the fields. Nothing else reads the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import shutil
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

from paceline.core.errors import MAX_PROBLEM_CHARS, ConfigError, PacelineError, shortened

ConfigT = TypeVar("ConfigT")

PROGRAM = "paceline"
ENVIRONMENT_PREFIX = "PACELINE_"
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})
EXIT_STATUS_CONFIG = 2
REQUIRED: Any = dataclasses.MISSING

_METADATA_KEY = "paceline.setting"
# Type of a value in a file; for other types text is accepted, too.
_FILE_TYPES: Mapping[type, Any] = {bool: bool, Path: str}
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
# Kinds of values in `--help`: the first pattern that fits a setting's name, else its unit, else its type.
_KINDS = {
    r"port|.*_port": "PORT",
    r".*_dir": "FOLDER",
    r"model|draft_model|target_model": "MODEL",
    r"fleet|.*_(file|cert|key|template)": "FILE",
    r".*_(url|endpoint)": "URL",
    r".*_arg": "FLAG",
    r"cpus|.*_cpus": "CPUS",
    r".*(_config|_schema)": "JSON",
    r"host|announce|ray": "HOST",
}
_UNITS = {"s": "SECONDS", "seconds": "SECONDS", "bytes": "BYTES", "tokens": "TOKENS", "GPU seconds": "SECONDS"}
_TYPES: Mapping[type, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
# Sections of `--help`, by the settings' names; all others come first.
_SECTIONS = {
    "ports and addresses": r"host|announce|zone|replica_id|.*port|port_offset|redis_.*|forwarded_.*|allowed_origins",
    "TLS and keys": r"tls_.*|api_keys_file|ca_file|.*api_key.*",
    "metrics, traces and logs": r"otlp_.*|trace_.*|log_.*|access_log|metrics_.*",
    "times and sizes": r".*(_s|_bytes)",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Help text of a field, and the values it takes."""

    help: str
    unit: str | None
    low: float | None
    high: float | None
    choices: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value from a file, and its place there."""

    value: Any
    source: str


def setting(
    default: Any = REQUIRED,
    *,
    help: str,  # noqa: A002 - the word argparse users know
    unit: str | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """Declares a field of a config class; without `default` it must be given.

    The field may be `str`, `int`, `float`, `bool`, `Path`, one of these or None, or `tuple[X, ...]` (a flag
    that may be repeated; comma-separated in the environment). `low` and `high` are inclusive, in `unit`.
    """
    described = Setting(
        help=help, unit=unit, low=low, high=high, choices=tuple(choices) if choices is not None else None
    )
    return dataclasses.field(default=default, metadata={_METADATA_KEY: described})


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    prog: str,
    description: str,
    first: str | None = None,
    given: Mapping[str, Given] = MappingProxyType({}),
) -> ConfigT:
    """Builds the configuration; a bad value ends the process with one line on stderr and exit status 2.

    The value of the flag `first` may stand first on the command line without the flag. Values `given` by a file apply
    where neither flag nor variable is set.
    """
    if first and argv and (argv[0] == "-" or not argv[0].startswith("-")):
        argv = [f"--{first}={argv[0]}", *argv[1:]]
    try:
        return load(config_class, argv, environ, prog, description, given)
    except ConfigError as error:
        exit_with_error(prog, error)


def load(
    config_class: type[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    prog: str,
    description: str,
    given: Mapping[str, Given] = MappingProxyType({}),
) -> ConfigT:
    """Builds the configuration.

    Raises:
        ConfigError: A value is missing, has the wrong type or is outside its limits; the message names
            setting, value and limit.
    """
    options = _options(config_class)
    flags = vars(_parser(options, prog, description).parse_args(list(argv)))
    values: dict[str, Any] = {}
    for option in options:
        raw = flags[option.name]
        if raw is not None:
            values[option.name] = option.convert(raw, source=option.flag)
        elif environ.get(option.variable):
            values[option.name] = option.convert_variable(environ[option.variable])
        elif option.name in given:
            found = given[option.name]
            values[option.name] = option.convert_value(found.value, source=found.source)
        elif option.required:
            raise ConfigError(f"{option.flag} is required (or set {option.variable}): {option.setting.help}")
    return config_class(**values)


def from_mapping(config_class: type[ConfigT], values: Mapping[str, Any], where: str) -> ConfigT:
    """Builds the configuration from a section of a file: field names and their values, no flags, no environment.

    Args:
        config_class: Class to build; a field may be such a class itself, and takes an object.
        values: By field name; a field that may be repeated takes a list.
        where: Prefix of the names in messages, such as `verifier.`; may be empty.

    Raises:
        ConfigError: A name is unknown, or a value is missing, has the wrong type or is outside its limits.
    """
    options = {option.name: option for option in _options(config_class)}
    for name in values:
        if name not in options:
            raise ConfigError(f"{where}{name} is no setting; there are {', '.join(options)}")
    for option in options.values():
        if option.required and option.name not in values:
            raise ConfigError(f"{where}{option.name} is required: {option.setting.help}")
    return config_class(**{name: _from_file(options[name], value, f"{where}{name}") for name, value in values.items()})


def _from_file(option: _Option, value: Any, source: str) -> Any:
    if not dataclasses.is_dataclass(option.base_type):
        return option.convert_value(value, source=source)
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must be a JSON object, got {value!r}")
    return from_mapping(option.base_type, value, f"{source}.")


@contextmanager
def named(flag: str, value: object) -> Iterator[None]:
    """Turns any library error while a setting is read at start into one line that names its flag and value.

    For reading alone: of code of ours the stack would be missed. Errors of ours that name a flag stay as they are.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        said = reason(error, value)
        if isinstance(error, PacelineError) and "--" in said:
            raise
        raise ConfigError(f"{flag} {shortened(str(value), MAX_PROBLEM_CHARS)}: {said}") from error


def reason(error: Exception, value: object = None) -> str:
    """An error in one line; a system error without the path that the caller names as `value`."""
    if isinstance(error, PacelineError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename and str(error.filename) != str(value) else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def parse_cpus(name: str, text: str) -> frozenset[int]:
    """Returns the CPUs of a list such as `0-3,7`.

    Raises:
        ConfigError: It is no such list; names the setting.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{name} must be a list of CPUs such as 4-5 or 0,2-3, got {text!r}")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)


def as_called(command: str) -> str:
    """Returns `paceline COMMAND` as the user who started this process would type it.

    It is `python -m paceline COMMAND`, `python -m paceline.COMMAND` where a service was started as a module, the path
    of the program where no search path leads to it, and `command` itself in any other program.
    """
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        name = module.name.removesuffix(".__main__")
        if name == PROGRAM:
            return f"python -m {command}"
        if name == command.replace(" ", "."):
            return f"python -m {name}"
    program = Path(sys.argv[0])
    if program.name != PROGRAM or shutil.which(PROGRAM) == str(program.absolute()):
        return command
    return f"{sys.argv[0]}{command.removeprefix(PROGRAM)}"


def exit_with_error(prog: str, error: Exception) -> NoReturn:
    """Ends the process with one line on stderr that says why it cannot start."""
    message = " ".join(str(error).split())
    sys.stderr.write(f"{as_called(prog)}: error: {message}\n")
    raise SystemExit(EXIT_STATUS_CONFIG)


def loggable(config: Any) -> dict[str, Any]:
    """Returns the fields of a config instance for the log line at start-up, without passwords in URLs."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        name: public_url(value) if isinstance(value, str) and "://" in value else value
        for name, value in fields.items()
    }


def public_url(url: str) -> str:
    """Returns the URL without user, password and query, fit for logs and error messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(not a URL)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    name: str
    base_type: type
    repeated: bool
    default: Any
    setting: Setting

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    def convert_variable(self, text: str) -> Any:
        if self.repeated:
            return self.convert([part for part in text.split(",") if part], source=self.variable)
        return self.convert(text, source=self.variable)

    def convert_value(self, value: Any, *, source: str) -> Any:
        """Takes a value from a file, where lists and single values differ."""
        if self.repeated != isinstance(value, list):
            raise ConfigError(f"{source} must be {'a list' if self.repeated else self.wanted}, got {value!r}")
        allowed = _FILE_TYPES.get(self.base_type, str | int | float)
        if not all(isinstance(part, allowed) for part in (value if self.repeated else [value])):
            raise self._refusal(value, source)
        return self.convert(value, source=source)

    def convert(self, raw: Any, *, source: str) -> Any:
        if self.repeated:
            return tuple(self._convert_one(part, source) for part in raw)
        return self._convert_one(raw, source)

    def _convert_one(self, raw: str | bool, source: str) -> Any:
        try:
            value = _to_type(self.base_type, raw)
        except ValueError:
            raise self._refusal(raw, source) from None
        except RuntimeError as error:
            raise ConfigError(f"{source} {raw}: {error} HOME is not set, or there is no such user") from None
        allowed = self.setting.choices
        if allowed is not None and value not in allowed:
            raise self._refusal(raw, source)
        if self.base_type in (int, float):
            low, high = self.setting.low, self.setting.high
            below = low is not None and value < low
            above = high is not None and value > high
            if not math.isfinite(value) or below or above:
                raise self._refusal(raw, source)
        return value

    def _refusal(self, raw: str | bool, source: str) -> ConfigError:
        return ConfigError(f"{source} must be {self.wanted}, got {shortened(str(raw), MAX_PROBLEM_CHARS)!r}")

    @property
    def wanted(self) -> str:
        if self.setting.choices is not None:
            return "one of " + ", ".join(self.setting.choices)
        low, high, unit = self.setting.low, self.setting.high, self.setting.unit
        wanted = _TYPE_NAMES[self.base_type]
        if unit is not None:
            wanted += f" of {unit}"
        if low is not None and high is not None:
            wanted += f" from {low:.15g} to {high:.15g}"
        elif low is not None:
            wanted += f" of at least {low:.15g}" if unit is None else f", at least {low:.15g}"
        elif high is not None:
            wanted += f" of at most {high:.15g}" if unit is None else f", at most {high:.15g}"
        return wanted

    @property
    def kind(self) -> str:
        """Word for its value in `--help`."""
        if self.setting.choices:
            return "{" + ",".join(self.setting.choices) + "}"
        by_name = (kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, self.name))
        return next(by_name, _UNITS.get(self.setting.unit or "", _TYPES.get(self.base_type, "VALUE")))

    @property
    def section(self) -> str:
        """Section of `--help`; empty: the first one."""
        return next((name for name, pattern in _SECTIONS.items() if re.fullmatch(pattern, self.name)), "")

    @property
    def help_line(self) -> str:
        if self.required:
            default = "required"
        elif self.default is None or self.default == () or self.default == "":
            default = "not set by default"
        else:
            default = f"default: {self.default}"
        repeat = "; may be repeated" if self.repeated else ""
        text = f"{self.setting.help} [{self.wanted}{repeat}; {default}; {self.variable}]"
        return text.replace("%", "%%")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}{self._nearest(message)} (see {self.prog} --help)")

    def _nearest(self, message: str) -> str:
        """Returns the known flag that is most like the first unknown one."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]*)", message)
        return "" if unknown is None else suggestion(unknown[1], self._option_string_actions)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns `, did you mean X?` for the known word that is most like one; empty: none is."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {nearest[0]}?" if nearest else ""


def setting_of(config_class: type[Any], name: str) -> Setting:
    """Returns the declaration of a field, in its class or a base; a subclass may change the default alone."""
    for each in config_class.__mro__:
        field = getattr(each, "__dataclass_fields__", {}).get(name)
        if field is not None and _METADATA_KEY in field.metadata:
            return typing.cast(Setting, field.metadata[_METADATA_KEY])
    raise TypeError(f"field {name} is not declared with setting()")


def _options(config_class: type[Any]) -> list[_Option]:
    """The settings of a class: its fields but for those with a default factory."""
    hints = typing.get_type_hints(config_class)
    return [
        _option(field, hints[field.name], setting_of(config_class, field.name))
        for field in dataclasses.fields(config_class)
        if field.default_factory is dataclasses.MISSING
    ]


def _option(field: dataclasses.Field[Any], hint: Any, described: Setting) -> _Option:
    alternatives = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = [part for part in typing.get_args(hint) if part is not types.NoneType]
    base_type = alternatives[0]
    repeated = typing.get_origin(base_type) is tuple
    if repeated:
        base_type = typing.get_args(base_type)[0]
    if len(alternatives) != 1 or not (base_type in _TYPE_NAMES or dataclasses.is_dataclass(base_type)):
        raise TypeError(f"field {field.name} has the unsupported type {hint!r}")
    return _Option(
        name=field.name,
        base_type=base_type,
        repeated=repeated,
        default=field.default,
        setting=described,
    )


def _parser(options: Sequence[_Option], prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=as_called(prog),
        description=description,
        epilog="Every flag can also be set by the environment variable named beside it; the flag wins.",
        allow_abbrev=False,
    )
    sections: dict[str, Any] = {"": parser}
    for option in options:
        if option.section not in sections:
            sections[option.section] = parser.add_argument_group(option.section)
        _add_flag(sections[option.section].add_argument, option)
    return parser


def _add_flag(add: Callable[..., argparse.Action], option: _Option) -> argparse.Action:
    if option.base_type is bool and not option.repeated:
        return add(option.flag, action=argparse.BooleanOptionalAction, help=option.help_line)
    action = "append" if option.repeated else "store"
    return add(option.flag, action=action, metavar=option.kind, help=option.help_line)


def add_flags(parser: argparse.ArgumentParser, config_class: type[Any]) -> list[argparse.Action]:
    """Adds the flags of a config class to a parser that only describes them, such as for a shell's completion.

    Returns:
        The flags; their types are those of the fields.
    """
    actions = []
    for option in _options(config_class):
        action = _add_flag(parser.add_argument, option)
        action.choices = option.setting.choices
        action.type = option.base_type
        action.help = option.setting.help.replace("%", "%%")
        actions.append(action)
    return actions


def _to_type(base_type: type, raw: str | bool | float) -> Any:
    if base_type is bool:
        return raw if isinstance(raw, bool) else _to_bool(str(raw))
    if base_type is int and isinstance(raw, float) and raw.is_integer():
        # Programs that write JSON may give whole numbers a decimal point.
        return int(raw)
    text = str(raw)
    if base_type is Path:
        return _path(text)
    return base_type(text)


def _path(text: str) -> Path:
    """A path that the system can look for, whether there is something or not."""
    if not text or "\0" in text:
        raise ValueError(text)
    try:
        path = Path(text).expanduser()
        path.exists()
    except OSError as error:
        raise ValueError(text) from error
    return path


def _to_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError(text)
    return word in TRUE_WORDS
