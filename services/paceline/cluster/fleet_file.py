"""A fleet's files: the Helm chart's values, for one machine and for Ray, and Ray's own words.

Both end as settings of `FleetSpec`, which `paceline up` reads from flags as well; on Ray a file also says what each
replica of a tier needs of a host. All else about a tier is a flag of its service. What means nothing outside
Kubernetes, such as node selectors, is left alone and named, so that a misspelt word is seen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.cluster.spec import PACELINE, VLLM, FleetSpec
from paceline.core.errors import ConfigError
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.service.config import ENVIRONMENT_PREFIX, Given, from_mapping, setting

ROLES = (GATEWAY, VERIFIER, DRAFTER)
# One vocabulary in three spellings: a value of the chart (`k8s/paceline/values.schema.json`), the setting of
# `paceline up`, and the key of Ray's file; empty if there is none. Of two values for one key the later row counts.
WORDS = (
    ("model.target", "model", "model"),
    ("model.draft", "draft_model", "draft_model"),
    ("simulate", "simulate", "simulate"),
    ("gateway.replicas", "num_gateways", "gateway.replicas"),
    ("verifier.replicas", "num_verifiers", "verifier.replicas"),
    ("drafter.replicas", "num_drafters", "drafter.replicas"),
    ("drafter.autoscaling.minReplicas", "", "drafter.min_replicas"),
    ("drafter.autoscaling.maxReplicas", "", "drafter.max_replicas"),
    ("drafter.autoscaling.targetLagTokens", "", "drafter.target_lag_tokens"),
    ("verifier.engine", "verifier_engine", "verifier.engine"),
    ("verifier.gpu", "", "verifier.gpus"),
    ("drafter.gpu", "", "drafter.gpus"),
    *((f"{role}.resources.requests.cpu", "", f"{role}.cpus") for role in ROLES),
    ("verifier.settings.threads", "verifier_threads", "verifier.cpus"),
    ("drafter.settings.threads", "drafter_threads", "drafter.cpus"),
    ("verifier.settings.speculative-config", "speculative_config", "speculative_config"),
    *((f"{role}.env", "", f"{role}.env") for role in ROLES),
    ("redis.url", "redis_url", "redis_url"),
    ("tracing.endpoint", "otlp_traces_endpoint", ""),
    ("tracing.sampleRatio", "trace_sample_ratio", ""),
)
SCALES, MOST_DRAFTERS = "drafter.autoscaling.enabled", "drafter.autoscaling.maxReplicas"
VLLM_ARGS = "verifier.vllmArgs"
# All that is read, on one machine and on Ray; besides these the `settings` of services.
READ = frozenset((*(value for value, name, _ in WORDS if name), VLLM_ARGS))
READ_ON_RAY = frozenset((*(value for value, _, key in WORDS if key), SCALES, VLLM_ARGS))
STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
# Settings of `paceline up` that mean the same on a cluster.
SHARED = (
    "model", "draft_model", "dtype", "speculative_config", "redis_url", "redis_port", "redis_server",
    "tls_dir", "tls_cert", "tls_key", "log_dir", "start_timeout_s", "grace_s", "simulate", "acceptance",
    "mean_output_tokens",
)  # fmt: skip
# What may change while the fleet runs.
RESIZABLE = (
    "replicas", "min_replicas", "max_replicas", "target_lag_tokens", "upscale_delay_s", "downscale_delay_s",
)  # fmt: skip
# Resources that have a setting of their own.
NAMED_RESOURCES = {"CPU": "cpus", "GPU": "gpus"}
MAX_REPLICAS = 1024
MAX_RESOURCE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Settings of any tier; what one replica needs, and how many there are."""

    replicas: int = setting(1, help="Replicas.", low=0, high=MAX_REPLICAS)
    cpus: float = setting(1.0, help="CPUs of a replica; whole ones are its threads.", low=0.01, high=4096)
    gpus: float = setting(0.0, help="GPUs of a replica.", low=0, high=64)
    accelerator_type: str = setting("", help="Kind of the GPUs as Ray calls it, such as H100 or L4.")
    strategy: str = setting("SPREAD", help="How Ray places the replicas over hosts.", choices=STRATEGIES)
    args: tuple[str, ...] = setting((), help="More flags of the service, such as --max-num-seqs=8.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(TierSettings):
    """Settings of the gateways."""

    port: int = setting(8000, help="HTTP port on every host; 0 picks free ones.", low=0, high=65535)
    grpc_port: int = setting(8001, help="gRPC port on every host; 0 picks free ones.", low=0, high=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSettings(TierSettings):
    """Settings of the verifiers."""

    engine: str = setting(PACELINE, help="What computes the target: our own engine, or vLLM.", choices=(PACELINE, VLLM))
    python: Path | None = setting(
        None, help="On every node, the Python of verifiers, where vLLM and this package are installed."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSettings(TierSettings):
    """Settings of the drafters; with `max_replicas` their number follows their lag."""

    min_replicas: int = setting(1, help="Fewest drafters.", low=1, high=MAX_REPLICAS)
    max_replicas: int = setting(0, help="Most drafters; 0: always `replicas`.", low=0, high=MAX_REPLICAS)
    target_lag_tokens: float = setting(8.0, help="Lag of a drafter that keeps up.", unit="tokens", low=0.01, high=1e6)
    upscale_delay_s: float = setting(
        10.0, help="How long it must lag before drafters are added.", unit="s", low=0, high=86_400
    )
    downscale_delay_s: float = setting(
        60.0, help="How long fewer must be enough before one goes.", unit="s", low=0, high=86_400
    )

    @property
    def scales(self) -> bool:
        """Whether the number of drafters follows their lag."""
        return self.max_replicas > 0


SettingsT = TypeVar("SettingsT", bound=TierSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier(Generic[SettingsT]):
    """One tier of the fleet.

    Attributes:
        resources: Custom resources of Ray that a replica takes, such as `verifier-gpu`.
        env: Environment variables of its process.
    """

    settings: SettingsT
    resources: Mapping[str, float]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFleetSpec:
    """Settings of a fleet on Ray; `services` is what its services share with those of `paceline up` on one machine."""

    services: FleetSpec
    gateway: Tier[GatewaySettings]
    verifier: Tier[VerifierSettings]
    drafter: Tier[DrafterSettings]

    def tier(self, role: str) -> Tier[Any]:
        """Returns the tier of a role."""
        tiers: dict[str, Tier[Any]] = {GATEWAY: self.gateway, VERIFIER: self.verifier, DRAFTER: self.drafter}
        return tiers[role]

    def num_replicas(self, role: str) -> int:
        """Returns how many replicas of a role are started."""
        if role == DRAFTER and self.drafter.settings.scales:
            return self.drafter.settings.min_replicas
        return int(self.tier(role).settings.replicas)


@dataclass(frozen=True, slots=True)
class FleetFile:
    """The chart's values for a fleet.

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
            name: Given(_plain(self.values[value]), f"--fleet {self.path}: {value}")
            for value, name, _ in WORDS
            if name and self._says(value)
        }
        if self.values.get("drafter.replicas") == 0:
            del found["num_drafters"]
            found["drafter"] = Given(False, f"--fleet {self.path}: drafter.replicas")
        for role in ROLES:
            if flags := self._flags(role, READ):
                found[f"{role}_arg"] = Given(flags, f"--fleet {self.path}: {role}.settings")
        return found

    def on_ray(self) -> dict[str, Any]:
        """Returns the document that `parse_spec` takes.

        Raises:
            ConfigError: Drafters are to be scaled, and it does not say up to which number.
        """
        tiers: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
        document: dict[str, Any] = dict(tiers)
        if self.values.get(SCALES) and not self._says(MOST_DRAFTERS):
            raise ConfigError(f"{MOST_DRAFTERS} must be a number of replicas where {SCALES} is true")
        left_out = "drafter.replicas" if self.values.get(SCALES) else "drafter.autoscaling."
        for value, _, key in WORDS:
            if key and self._says(value) and not value.startswith(left_out):
                role, _, name = key.rpartition(".")
                tiers.get(role, document)[name] = _for_ray(value, self.values[value])
        for role, tier in tiers.items():
            if flags := self._flags(role, READ_ON_RAY):
                tier["args"] = flags
        if tiers[GATEWAY].get("replicas", 1) != 1:
            # Pods have addresses of their own; on Ray the hosts have.
            tiers[GATEWAY]["strategy"] = "STRICT_SPREAD"
        return document

    def _says(self, value: str) -> bool:
        return self.values.get(value) not in ("", None)

    def unused(self, read: Collection[str]) -> list[str]:
        """Returns the names of values that mean nothing here: neither read nor settings of a service."""
        settings = tuple(f"{role}.settings." for role in ROLES)
        return [name for name in self.values if name not in read and not name.startswith(settings)]

    def _flags(self, role: str, read: Collection[str]) -> list[str]:
        """Flags of a service: its settings, except those that have a word of their own."""
        prefix = f"{role}.settings."
        flags = [
            flag
            for name, value in self.values.items()
            if name.startswith(prefix) and name not in read
            for flag in _flag(name.removeprefix(prefix), value)
        ]
        vllm = self.values.get(VLLM_ARGS, ()) if role == "verifier" else ()
        return [*flags, *(f"--{VLLM}-arg={argument}" for argument in vllm)]


def read_fleet_file(path: Path) -> FleetFile:
    """Reads the chart's values.

    Raises:
        ConfigError: The file cannot be read, or is no YAML mapping of names to values.
    """
    document = _read_yaml("--fleet", path)
    if not isinstance(document, dict):
        raise ConfigError(f"--fleet {path}: must be a mapping of names to values, got {document!r}")
    return FleetFile(path, dict(_flat(document)))


def read_spec(path: Path) -> RayFleetSpec:
    """Reads a file in Ray's words.

    Raises:
        ConfigError: It cannot be read, or a key or value in it is wrong; names file, key, value and limit.
    """
    document = _read_yaml("--spec", path)
    try:
        return parse_spec(document)
    except ConfigError as error:
        raise ConfigError(f"--spec {path}: {error}") from None


def _read_yaml(flag: str, path: Path) -> Any:
    import yaml  # An extra: only those who name a file need it.

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} is no YAML: {' '.join(str(error).split())}") from None


def parse_spec(document: Any) -> RayFleetSpec:
    """Checks what a file in Ray's words says.

    Raises:
        ConfigError: A key or value is wrong; names key, value and limit.
    """
    values = dict(_mapping("the file", document))
    sections = {role: _mapping(role, values.pop(role, {})) for role in ROLES}
    for name in values:
        if name not in SHARED:
            raise ConfigError(f"{name} is no setting; there are {', '.join((*ROLES, *SHARED))}")
    if isinstance(values.get("speculative_config"), dict):
        values["speculative_config"] = json.dumps(values["speculative_config"])
    shared = from_mapping(FleetSpec, values, "")
    gateway = _tier(GATEWAY, GatewaySettings, sections[GATEWAY])
    verifier = _tier(VERIFIER, VerifierSettings, sections[VERIFIER])
    drafter = _tier(DRAFTER, DrafterSettings, sections[DRAFTER])
    _check_gateway(gateway.settings)
    _check_verifier(verifier.settings)
    _check_drafter(drafter.settings, sections[DRAFTER])
    most_drafters = drafter.settings.max_replicas or drafter.settings.replicas
    services = replace(
        shared,
        drafter=most_drafters > 0,
        num_drafters=most_drafters,
        gateway_arg=gateway.settings.args,
        verifier_engine=verifier.settings.engine,
        verifier_python=verifier.settings.python,
        verifier_arg=verifier.settings.args,
        drafter_arg=drafter.settings.args,
    )
    return RayFleetSpec(services=services, gateway=gateway, verifier=verifier, drafter=drafter)


def check_resize(old: RayFleetSpec, new: RayFleetSpec) -> None:
    """Lets only numbers of replicas, and how drafters scale, change while a fleet runs.

    Raises:
        ConfigError: Something else differs, or nothing keeps a new gateway off the ports of another; names it.
    """
    for role in ROLES:
        before, after = old.tier(role), new.tier(role)
        for name in ("resources", "env"):
            _check_same(f"{role}.{name}", getattr(before, name), getattr(after, name))
        for name in (field.name for field in fields(before.settings) if field.name not in RESIZABLE):
            _check_same(f"{role}.{name}", getattr(before.settings, name), getattr(after.settings, name))
    for name in (*SHARED, "drafter"):
        _check_same(name, getattr(old.services, name), getattr(new.services, name))
    gateways = new.gateway
    fixed = gateways.settings.port or gateways.settings.grpc_port
    if fixed and not gateways.resources and gateways.settings.replicas > old.gateway.settings.replicas:
        raise ConfigError(
            f"gateway.replicas: another gateway may come to a host where one has port {fixed} already; start each host "
            "with a resource such as gateway-port: 1, and have gateway.resources take it"
        )


def _check_same(name: str, before: Any, after: Any) -> None:
    if before != after:
        raise ConfigError(f"{name} cannot change while the fleet runs, from {before!r} to {after!r}: start it anew")


def _tier(role: str, settings_class: type[SettingsT], section: Mapping[str, Any]) -> Tier[SettingsT]:
    values = dict(section)
    resources = _resources(f"{role}.resources", values.pop("resources", {}))
    env = _environment(f"{role}.env", values.pop("env", {}))
    settings = from_mapping(settings_class, values, f"{role}.")
    if settings.gpus > 1 and not float(settings.gpus).is_integer():
        raise ConfigError(f"{role}.gpus must be a whole number above 1, or a part of one GPU, got {settings.gpus:g}")
    if settings.accelerator_type and not settings.gpus:
        raise ConfigError(f"{role}.accelerator_type needs {role}.gpus of more than 0 beside it")
    return Tier(settings=settings, resources=resources, env=env)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a mapping of names to values, got {value!r}")
    return value


def _resources(name: str, value: Any) -> Mapping[str, float]:
    resources = _mapping(name, value)
    for key, amount in resources.items():
        if key in NAMED_RESOURCES:
            raise ConfigError(f"{name}.{key}: is set by {NAMED_RESOURCES[key]}")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount <= MAX_RESOURCE:
            raise ConfigError(f"{name}.{key} must be a number above 0, at most {MAX_RESOURCE:g}, got {amount!r}")
    return {key: float(amount) for key, amount in resources.items()}


def _environment(name: str, value: Any) -> Mapping[str, str]:
    variables = _mapping(name, value)
    for key, text in variables.items():
        if key.startswith(ENVIRONMENT_PREFIX):
            raise ConfigError(f"{name}.{key}: settings of the service go into args, as flags")
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            raise ConfigError(f"{name}.{key} must be text or a number, got {text!r}")
    return {key: str(text) for key, text in variables.items()}


def _check_gateway(settings: GatewaySettings) -> None:
    if settings.replicas < 1:
        raise ConfigError(f"gateway.replicas must be at least 1, got {settings.replicas}")
    fixed = next((name for name in ("port", "grpc_port") if getattr(settings, name)), None)
    if fixed and settings.replicas > 1 and settings.strategy != "STRICT_SPREAD":
        raise ConfigError(
            f"gateway.{fixed} {getattr(settings, fixed)}: two gateways on one host cannot share it; "
            "write strategy: STRICT_SPREAD, or 0 for free ports"
        )


def _check_verifier(settings: VerifierSettings) -> None:
    if settings.replicas < 1:
        raise ConfigError(f"verifier.replicas must be at least 1, got {settings.replicas}")


def _check_drafter(settings: DrafterSettings, section: Mapping[str, Any]) -> None:
    if not settings.scales:
        return
    if "replicas" in section:
        raise ConfigError("drafter.replicas and drafter.max_replicas exclude each other")
    if settings.min_replicas > settings.max_replicas:
        raise ConfigError(
            f"drafter.min_replicas must be at most max_replicas {settings.max_replicas}, got {settings.min_replicas}"
        )


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their dotted names; a setting that is a mapping, and an environment, stay whole."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        whole = name.endswith(".env") or ".settings." in name
        if isinstance(value, dict) and value and not whole:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _plain(value: Any) -> Any:
    """A value as a flag takes it: mappings as JSON."""
    return json.dumps(value) if isinstance(value, dict) else value


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={_plain(each)}" for each in (value if isinstance(value, list) else [value])]


def _for_ray(name: str, value: Any) -> Any:
    """A value of the chart as Ray's file has it: a number of GPUs, and CPUs without Kubernetes' `m`."""
    if name.endswith(".gpu"):
        return 1 if value else 0
    if not name.endswith(".cpu"):
        return value
    text = str(value)
    try:
        return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    except ValueError:
        # Refused where Ray's words are checked.
        return value
