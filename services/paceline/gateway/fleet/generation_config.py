"""The sampling defaults that a model brings along in its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoints.json_files import read_object
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.params import SAMPLING, SamplingParams

FILE = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
_FIELDS: Mapping[str, type] = {
    **{name: type(row.default) for name, row in SAMPLING.items() if row.own},
    "max_new_tokens": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """Defaults for fields that a request leaves out.

    Attributes:
        sampling: Fields of `SamplingParams` that the model has a value for.
        max_new_tokens: Longest answer of a chat, in tokens; None: as far as the context reaches.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None


NO_DEFAULTS = ModelDefaults()


def model_defaults(source: str, folder: Path) -> ModelDefaults:
    """Returns a model's own defaults; none where its folder has no such file.

    Args:
        source: "auto": the model's folder; "vllm": no file, neutral defaults; else another folder.
        folder: The model's.

    Raises:
        ConfigError: The file cannot be read, another folder has none, or a field of it is outside its limits.
    """
    if source == NEUTRAL:
        return NO_DEFAULTS
    path = (folder if source == AUTO else Path(source).expanduser()) / FILE
    if source == AUTO and not path.is_file():
        return NO_DEFAULTS
    try:
        return _read(read_object(path))
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(content: Mapping[str, Any]) -> ModelDefaults:
    given = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    for name, value in given.items():
        whole = _FIELDS[name] is int
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            kind = "a whole number" if whole else "a number"
            raise InvalidRequestError(name, f"must be {kind}, got {value!r}")
    max_new_tokens = given.pop("max_new_tokens", None)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InvalidRequestError("max_new_tokens", f"must be at least 1, got {max_new_tokens}")
    if given.get("top_k") == -1:
        given["top_k"] = 0
    # Made for its checks alone.
    SamplingParams(max_tokens=1, **given)
    return ModelDefaults(sampling=given, max_new_tokens=max_new_tokens)
