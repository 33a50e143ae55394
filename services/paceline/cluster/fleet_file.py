"""A fleet's file: the values of the Helm chart, read by `paceline up` on one machine and on Ray.

One file serves all three. Its JSON schema is the chart's, `k8s/paceline/values.schema.json`. What means nothing outside
Kubernetes, such as node selectors, is left alone and named, so that a word written wrongly is seen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.spec import VLLM
from paceline.core.errors import ConfigError
from paceline.service.config import Given

ROLES = ("gateway", "verifier", "drafter")
# Settings of `paceline up` by the chart's values that mean the same.
SAME = {
    "model.target": "model",
    "model.draft": "draft_model",
    "gateway.replicas": "num_gateways",
    "verifier.replicas": "num_verifiers",
    "drafter.replicas": "num_drafters",
    "verifier.engine": "verifier_engine",
    "verifier.settings.threads": "verifier_threads",
    "drafter.settings.threads": "drafter_threads",
    "verifier.settings.speculative-config": "speculative_config",
    "tracing.endpoint": "otlp_traces_endpoint",
    "tracing.sampleRatio": "trace_sample_ratio",
    "redis.url": "redis_url",
}
# The same for a fleet on Ray (`paceline.cluster.ray.spec`).
SAME_ON_RAY = {
    "model.target": "model",
    "model.draft": "draft_model",
    "gateway.replicas": "gateway.replicas",
    "verifier.replicas": "verifier.replicas",
    "drafter.replicas": "drafter.replicas",
    "verifier.engine": "verifier.engine",
    "verifier.settings.threads": "verifier.cpus",
    "drafter.settings.threads": "drafter.cpus",
    "verifier.settings.speculative-config": "speculative_config",
    "gateway.env": "gateway.env",
    "verifier.env": "verifier.env",
    "drafter.env": "drafter.env",
    "redis.url": "redis_url",
}
DRAFTER_SCALING = {
    "drafter.autoscaling.minReplicas": "min_replicas",
    "drafter.autoscaling.maxReplicas": "max_replicas",
    "drafter.autoscaling.targetLagTokens": "target_lag_tokens",
}
SCALES = "drafter.autoscaling.enabled"
VLLM_ARGS = "verifier.vllmArgs"
CPUS = {f"{role}.resources.requests.cpu": role for role in ROLES}
GPUS = {"verifier.gpu": "verifier", "drafter.gpu": "drafter"}
# All that is read, on one machine and on Ray; besides these the `settings` of services.
READ = frozenset((*SAME, VLLM_ARGS))
READ_ON_RAY = frozenset((*SAME_ON_RAY, *DRAFTER_SCALING, *CPUS, *GPUS, SCALES, VLLM_ARGS))


@dataclass(frozen=True, slots=True)
class FleetFile:
    """What a fleet's file says.

    Attributes:
        path: Stands in messages.
        values: By their dotted names, down to what is no mapping; `settings`, `env` and `speculative-config` go deeper
            in the file than here.
    """

    path: Path
    values: Mapping[str, Any]

    def local(self) -> dict[str, Given]:
        """Returns the settings of `FleetSpec` that it gives, and where each stands."""
        found = {
            field: Given(_plain(self.values[name]), f"--fleet {self.path}: {name}")
            for name, field in SAME.items()
            if name in self.values and self.values[name] not in ("", None)
        }
        if self.values.get("drafter.replicas") == 0:
            del found["num_drafters"]
            found["drafter"] = Given(False, f"--fleet {self.path}: drafter.replicas")
        for role in ROLES:
            if flags := self._flags(role, SAME):
                found[f"{role}_arg"] = Given(flags, f"--fleet {self.path}: {role}.settings")
        return found

    def on_ray(self) -> dict[str, Any]:
        """Returns the document that `paceline.cluster.ray.spec.parse_spec` takes."""
        document: dict[str, Any] = {}
        for name, key in SAME_ON_RAY.items():
            if name in self.values and self.values[name] not in ("", None):
                section, _, field = key.rpartition(".")
                (document.setdefault(section, {}) if section else document)[field] = self.values[name]
        tiers = {role: document.setdefault(role, {}) for role in ROLES}
        for role, tier in tiers.items():
            if flags := self._flags(role, SAME_ON_RAY):
                tier["args"] = flags
        for name, role in GPUS.items():
            tiers[role] |= {"gpus": 1} if self.values.get(name) else {}
        for name, role in CPUS.items():
            if name in self.values:
                tiers[role].setdefault("cpus", _cpus(self.values[name]))
        if tiers["gateway"].get("replicas", 1) != 1:
            # Pods have addresses of their own; on Ray it is the hosts.
            tiers["gateway"]["strategy"] = "STRICT_SPREAD"
        if self.values.get(SCALES):
            tiers["drafter"].pop("replicas", None)
            tiers["drafter"] |= {key: self.values[name] for name, key in DRAFTER_SCALING.items() if name in self.values}
        return document

    def unused(self, read: Collection[str]) -> list[str]:
        """Returns the names of values that mean nothing here: neither read nor settings of a service."""
        settings = tuple(f"{role}.settings." for role in ROLES)
        return [name for name in self.values if name not in read and not name.startswith(settings)]

    def _flags(self, role: str, names: Mapping[str, str]) -> list[str]:
        """Flags of a service: its settings, but those that are somebody else's to pass on."""
        prefix = f"{role}.settings."
        flags = [
            flag
            for name, value in self.values.items()
            if name.startswith(prefix) and name not in names
            for flag in _flag(name.removeprefix(prefix), value)
        ]
        vllm = self.values.get(VLLM_ARGS, ()) if role == "verifier" else ()
        return [*flags, *(f"--{VLLM}-arg={argument}" for argument in vllm)]


def read_fleet_file(path: Path) -> FleetFile:
    """Reads a fleet's file.

    Raises:
        ConfigError: It cannot be read, or is no YAML mapping of names to values.
    """
    import yaml  # Only who names a file needs it.

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--fleet {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--fleet {path} is no YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"--fleet {path}: must be a mapping of names to values, got {document!r}")
    return FleetFile(path, dict(_flat(document)))


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their dotted names; a setting that is a mapping, and an environment, stay whole."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        whole = name.endswith(".env") or ".settings." in name
        if isinstance(value, dict) and value and not whole:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _cpus(quantity: Any) -> Any:
    """CPUs as Kubernetes writes them, 500m for half of one; anything else as it is, to be refused where it is read."""
    text = str(quantity)
    try:
        return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    except ValueError:
        return quantity


def _plain(value: Any) -> Any:
    """A value as a flag takes it: mappings as JSON."""
    return json.dumps(value) if isinstance(value, dict) else value


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={_plain(each)}" for each in (value if isinstance(value, list) else [value])]
