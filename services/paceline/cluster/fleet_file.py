"""A fleet's file: settings of `paceline up` by their names, and under `ray` what they lack for a Ray cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from paceline.cluster.spec import FleetSpec
from paceline.core.errors import ConfigError
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.service.config import ENVIRONMENT_PREFIX, Given, from_mapping, named, setting
from paceline.store.redis import require_server

ROLES = (GATEWAY, VERIFIER, DRAFTER)
RAY = "ray"
# Where the file is, and where the fleet is to run, stands in no file.
NAMES = tuple(each.name for each in fields(FleetSpec) if each.name not in ("fleet", RAY))
# Settings that decide what each host of a cluster decides for itself.
OF_ONE_MACHINE = (
    "host", "verifier_port", "verifier_metrics_port", "drafter_port", "drafter_metrics_port", "memory_utilization",
    "pin", "lend",
)  # fmt: skip
STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
# Resources that have a setting of their own.
NAMED_RESOURCES = {"CPU": "cpus", "GPU": "gpus"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTier:
    """Resources of a Ray cluster that each replica of a tier takes, and environment variables that it gets."""

    cpus: float = setting(1.0, help="CPUs; whole ones are its threads where no flag sets them.", low=0.01, high=4096)
    gpus: float = setting(0.0, help="GPUs.", low=0, high=64)
    accelerator_type: str = setting("", help="Kind of the GPUs as `ray status` shows it, such as H100 or L4.")
    strategy: str = setting("SPREAD", help="How Ray places the replicas over hosts.", choices=STRATEGIES)
    resources: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


# Settings of `FleetSpec` with their places, and what replicas take of a Ray cluster, by role.
FleetFile = tuple[Mapping[str, Given], Mapping[str, RayTier]]


def read_fleet_file(path: Path) -> FleetFile:
    """Reads a file.

    Raises:
        ConfigError: It cannot be read, or a key or value in it is wrong; names file, key, value and limit.
    """
    where = f"--fleet {path}"
    with named("--fleet", path):
        return parse_fleet(yaml.safe_load(path.read_text(encoding="utf-8")), where)


def parse_fleet(document: Any, where: str) -> FleetFile:
    """Checks the names of a file's keys and its section `ray`; values of settings are checked with the flags.

    Raises:
        ConfigError: A key, or a value of the section, is wrong; names it and the limit.
    """
    values = dict(_mapping("the file", document))
    tiers = ray_tiers(values.pop(RAY, {}))
    for name in values:
        if name not in NAMES:
            raise ConfigError(f"{name} is no setting; there are {', '.join((RAY, *NAMES))}")
    if isinstance(values.get("speculative_config"), dict):
        values["speculative_config"] = json.dumps(values["speculative_config"])
    return {name: Given(value, f"{where}: {name}") for name, value in values.items()}, tiers


def ray_tiers(section: Any) -> Mapping[str, RayTier]:
    """Reads the section `ray`, by role.

    Raises:
        ConfigError: A key or value is wrong; names key, value and limit.
    """
    sections = _mapping(RAY, section)
    for name in sections:
        if name not in ROLES:
            raise ConfigError(f"{RAY}.{name} is no section; there are {', '.join(ROLES)}")
    return {role: _tier(f"{RAY}.{role}", sections.get(role, {})) for role in ROLES}


def check_for_ray(spec: FleetSpec) -> None:
    """Refuses what a fleet on a Ray cluster would not do.

    Raises:
        ConfigError: A setting of one machine is set.
    """
    alone = FleetSpec()
    for name in OF_ONE_MACHINE:
        if getattr(spec, name) != getattr(alone, name):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --ray: its hosts decide that themselves")
    if spec.redis_url is not None:
        require_server(spec.redis_url)


def _tier(name: str, section: Any) -> RayTier:
    values = dict(_mapping(name, section))
    resources = _checked(f"{name}.resources", values.pop("resources", {}), _amount)
    env = _checked(f"{name}.env", values.pop("env", {}), _variable)
    tier = from_mapping(RayTier, values, f"{name}.")
    if tier.gpus > 1 and not tier.gpus.is_integer():
        raise ConfigError(f"{name}.gpus must be a whole number above 1, or a part of one GPU, got {tier.gpus:g}")
    if tier.accelerator_type and not tier.gpus:
        raise ConfigError(f"{name}.accelerator_type needs {name}.gpus of more than 0 beside it")
    return replace(tier, resources=resources, env=env)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a mapping of names to values, got {value!r}")
    return value


def _checked(name: str, value: Any, check: Callable[[str, str, Any], Any]) -> Mapping[str, Any]:
    return {key: check(f"{name}.{key}", key, each) for key, each in _mapping(name, value).items()}


def _amount(name: str, key: str, value: Any) -> float:
    if key in NAMED_RESOURCES:
        raise ConfigError(f"{name}: is set by {NAMED_RESOURCES[key]}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def _variable(name: str, key: str, value: Any) -> str:
    if key.startswith(ENVIRONMENT_PREFIX):
        raise ConfigError(f"{name}: settings of a service go into verifier_arg and the like, as flags")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{name} must be text or a number, got {value!r}")
    return str(value)
