"""Facts that a plan stands on: what steps take on which device, what guesses are worth, what all of it costs.

A profile is a JSON file; `docs/capacity.md` names its keys. Whether its figures were measured or computed is one of
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoints.json_file import read_object
from paceline.core.errors import ConfigError
from paceline.core.step_time import StepCost
from paceline.planning.guesses import DrawnGuesses, GuessSource, RecordedGuesses, RecordedPlace

MEASURED, COMPUTED = "measured", "computed"
# In a file `rows` are those of the step's table; how a drafter drafts goes by the names of its flags.
_DRAFTING = {"draft_width": "width", "draft_rows": "rows", "draft_rows_per_session": "rows_per_session"}
SHIPPED = Path(__file__).with_name("profiles")

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One replica of a model on its device.

    Args:
        name: Of the device, as in `H100`.
        cost: Seconds of a step by its rows.
        num_devices: GPUs of a replica.
        price_per_hour: Of one of these, in any currency.
        session_s: Seconds of a step for each session in it, beside its rows.
        kv_token_s: Seconds of a step for each token of KV that it reads.
        noise: Standard deviation of the logarithm of a step's time.
        kv_tokens: Tokens whose KV it holds.
        max_sessions: Most sessions that run at once.
        max_rows: Most rows of a step, prefill included.
    """

    name: str
    cost: StepCost
    num_devices: int = 1
    price_per_hour: float = 0.0
    session_s: float = 0.0
    kv_token_s: float = 0.0
    noise: float = 0.0
    kv_tokens: int = 32_768
    max_sessions: int = 64
    max_rows: int = 512

    def __post_init__(self) -> None:
        """Checks the limits."""
        for name in ("num_devices", "kv_tokens", "max_sessions", "max_rows"):
            _require(name, getattr(self, name) >= 1, f"must be at least 1, got {getattr(self, name)!r}")
        for name in ("price_per_hour", "session_s", "kv_token_s", "noise"):
            _require(name, getattr(self, name) >= 0, f"must be 0 or more, got {getattr(self, name)!r}")

    def seconds(self, rows: int, *, num_sessions: int, kv_tokens: int = 0) -> float:
        """Expected time of a step."""
        if not rows:
            return 0.0
        return self.cost.at(rows) + self.session_s * num_sessions + self.kv_token_s * kv_tokens

    @property
    def replica_price_per_hour(self) -> float:
        """Of all its devices."""
        return self.num_devices * self.price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """A draft model on its device, and how it drafts; see `paceline drafter --help` for the last three."""

    device: DeviceFacts
    width: int = 3
    rows: int = 16
    rows_per_session: int = 4

    def __post_init__(self) -> None:
        """Checks the limits."""
        for name in ("width", "rows", "rows_per_session"):
            _require(name, getattr(self, name) >= 1, f"must be at least 1, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All facts of a pair of models on its hardware.

    Args:
        name: What tables call it.
        kind: `measured` or `computed`.
        origin: Where the figures come from, in a sentence.
        target: The target model.
        drafter: The draft model on a device of its own.
        colocated: The draft model on the target's devices.
        colocated_kv_tokens: Tokens of KV that the target is left with beside it.
        truth: What the drafter guesses, and whether it is right.
        drafting_overhead: Share by which the target's steps take longer while drafters work.
        link_s: Seconds from a verifier to a drafter, and as many back.
        door_s: Seconds that a request and its first token spend outside the verifier.
        most_nodes: Most draft tokens of a session that a step verifies.
    """

    name: str
    kind: str
    origin: str
    target: DeviceFacts
    drafter: DrafterFacts
    colocated: DrafterFacts
    colocated_kv_tokens: int
    truth: GuessSource
    drafting_overhead: float = 0.0
    link_s: float = 0.0002
    door_s: float = 0.002
    most_nodes: int = 12

    def __post_init__(self) -> None:
        """Checks the limits."""
        _require("kind", self.kind in (MEASURED, COMPUTED), f"must be {MEASURED} or {COMPUTED}, got {self.kind!r}")
        for name in ("drafting_overhead", "link_s", "door_s"):
            _require(name, getattr(self, name) >= 0, f"must be 0 or more, got {getattr(self, name)!r}")
        _require("most_nodes", 0 <= self.most_nodes <= 64, f"must be from 0 to 64, got {self.most_nodes!r}")
        _require("colocated_kv_tokens", self.colocated_kv_tokens >= 1, "must be at least 1")


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        ConfigError: It cannot be read, or a key is missing, unknown or outside its limits; the message names it.
    """
    try:
        return profile_from(read_object(path))
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error}") from None


def profile_from(given: Mapping[str, Any]) -> Profile:
    """A profile from the object in its file; raises as `read_profile`, without the file's name."""
    decoders = {
        "target": _device,
        "drafter": _drafter,
        "colocated": _drafter,
        "acceptance": _guesses,
    }
    decoded = {key: decoders[key](value, key) if key in decoders else value for key, value in given.items()}
    if "acceptance" in decoded:
        decoded["truth"] = decoded.pop("acceptance")
    return _build(Profile, decoded, "")


def profile_object(profile: Profile) -> dict[str, Any]:
    """What a profile's file holds."""
    plain = {each.name: getattr(profile, each.name) for each in fields(Profile) if each.name != "truth"}
    for key in ("drafter", "colocated"):
        drafting = {flag: getattr(plain[key], name) for flag, name in _DRAFTING.items()}
        plain[key] = _device_object(plain[key].device) | drafting
    return plain | {"target": _device_object(profile.target), "acceptance": _guesses_object(profile.truth)}


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile's file."""
    path.write_text(json.dumps(profile_object(profile), indent=1) + "\n", encoding="utf-8")


def _device(given: Any, key: str) -> DeviceFacts:
    values = dict(_object(given, key))
    for name in ("rows", "seconds"):
        if name not in values:
            raise ConfigError(f"{key}.{name} is missing: a step's {name} by point of its table")
    try:
        cost = StepCost(rows=tuple(values.pop("rows")), seconds=tuple(values.pop("seconds")))
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{key}: {error}") from None
    return _build(DeviceFacts, values | {"cost": cost}, key)


def _drafter(given: Any, key: str) -> DrafterFacts:
    values = dict(_object(given, key))
    drafting = {name: values.pop(flag) for flag, name in _DRAFTING.items() if flag in values}
    return _build(DrafterFacts, drafting | {"device": _device(values, key)}, key)


def _guesses(given: Any, key: str) -> GuessSource:
    values = _object(given, key)
    if "texts" not in values:
        return _build(DrawnGuesses, dict(values), key)
    try:
        texts = [[_place(entry) for entry in text] for text in values["texts"]]
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{key}.texts: needs lists of [rank, confidence, ...] for every token ({error})") from None
    return RecordedGuesses(texts)


def _place(entry: list[float]) -> RecordedPlace:
    rank = int(entry[0])
    return RecordedPlace(rank=None if rank < 0 else rank, confidences=tuple(map(float, entry[1:])))


def _guesses_object(truth: GuessSource) -> dict[str, Any]:
    if isinstance(truth, RecordedGuesses):
        entries = [
            [[-1 if place.rank is None else place.rank, *place.confidences] for place in text] for text in truth.texts
        ]
        return {"texts": entries}
    return {each.name: getattr(truth, each.name) for each in fields(DrawnGuesses) if not each.name.startswith("_")}


def _device_object(facts: DeviceFacts) -> dict[str, Any]:
    plain = {each.name: getattr(facts, each.name) for each in fields(DeviceFacts) if each.name != "cost"}
    return plain | {"rows": facts.cost.rows, "seconds": facts.cost.seconds}


def _build(made: type[Facts], values: Mapping[str, Any], key: str) -> Facts:
    """An instance of a dataclass of facts; errors name the key in the file."""
    known = {each.name: each for each in fields(made) if not each.name.startswith("_")}  # type: ignore[arg-type]
    prefix = f"{key}." if key else ""
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{prefix}{name} is not known; there are {', '.join(known)}")
        _check_type(f"{prefix}{name}", str(known[name].type), value)
    try:
        return made(**values)
    except TypeError as error:
        raise ConfigError(f"{prefix.rstrip('.') or 'the file'}: {str(error).partition('() ')[2]}") from None
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _check_type(name: str, wanted: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted == "float" and not is_number:
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if wanted == "int" and not (is_number and value == int(value)):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if wanted == "str" and not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {value!r}")


def _object(given: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{key} must be a JSON object, got {given!r}")
    return given


def _require(name: str, ok: bool, problem: str) -> None:
    if not ok:
        raise ConfigError(f"{name} {problem}")
