"""Settings of a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from paceline.checkpoints.source import TEXT_FILES, folder_of, served_name
from paceline.core.addresses import check_host
from paceline.core.errors import ConfigError
from paceline.gateway.message.form import AUTO, REASONING_FAMILIES, TOOL_FAMILIES, check_families
from paceline.obs.tracing import ENDPOINT_HELP
from paceline.service.config import named, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    model: tuple[str, ...] = setting(
        help="Folder with the tokenizer of a served model, or ORG/NAME of the Hub; NAME=FOLDER to give it a name."
    )
    model_name: str = setting("", help="Name of the model if there is one only; empty: the folder's, or ORG/NAME.")
    served_model_name: tuple[str, ...] = setting(
        (), help="Further names of a model in requests; ALIAS=NAME where --model names several."
    )
    chat_template: Path | None = setting(
        None, help="Jinja file that makes prompts of chats, instead of the template of each --model."
    )
    trust_request_chat_template: bool = setting(
        False, help="Let requests bring chat templates of their own; one that never ends occupies a thread for good."
    )
    generation_config: str = setting(
        "auto",
        help="Where the models' own sampling defaults come from: auto, the generation_config.json of each --model; "
        "vllm, nowhere, all are neutral; or a folder that holds such a file, for all models.",
    )
    tool_call_parser: str = setting(
        AUTO,
        help=f"How the models write tool calls: auto (as their chat templates tell), none, {', '.join(TOOL_FAMILIES)}.",
    )
    reasoning_parser: str = setting(
        AUTO, help=f"How the models set reasoning apart: auto, none, {', '.join(REASONING_FAMILIES)}."
    )
    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(8000, help="HTTP port; 0 picks a free one.", low=0, high=65535)
    grpc_port: int = setting(8001, help="gRPC port; 0 picks a free one.", low=0, high=65535)
    redis_url: str = setting("redis://127.0.0.1:6379", help="Registry and session records.")
    tls_dir: Path | None = setting(
        None,
        help="Folder with ca.pem, tls.pem and tls.key: mutual TLS towards the verifiers; without it plain text.",
    )
    tls_cert: Path | None = setting(
        None, help="Certificate chain to show to clients; makes both doors, HTTP and gRPC, TLS."
    )
    tls_key: Path | None = setting(None, help="Private key of --tls-cert.")
    api_keys_file: Path | None = setting(
        None,
        help="Lines of name:sha256[:requests-per-minute[:max-sessions]], as `paceline key` makes them; without it "
        "no key is needed.",
    )
    replica_id: str = setting("", help="Name of this replica in the registry, and of the owner in session records.")
    zone: str = setting(
        "", help="Zone that this replica runs in, such as a cloud's; those of one zone prefer each other."
    )
    max_sessions: int = setting(
        256, help="Most new sessions at once, and as many continued ones; requests beyond get 429.", low=1, high=100_000
    )
    strict_fields: bool = setting(
        False, help="Refuse requests with unknown fields, instead of ignoring these and naming them in a header."
    )
    allowed_origins: tuple[str, ...] = setting(
        (), help="Origins whose pages may call the HTTP door (CORS), such as https://chat.example.com; * for all."
    )
    forwarded_allow_ips: tuple[str, ...] = setting(
        (),
        help="Proxies, as addresses or networks, whose X-Forwarded-For names the client in the access log; * for all.",
    )
    access_log: bool = setting(False, help="Log a line for each HTTP request when its answer has ended.")
    max_body_bytes: int = setting(
        4 * 1024 * 1024, help="Largest request body.", unit="bytes", low=1024, high=256 * 1024 * 1024
    )
    body_timeout_s: float = setting(30.0, help="Time for a body to arrive.", unit="s", low=0.1, high=3600)
    stream_ping_s: float = setting(
        15.0,
        help="Longest silence of a stream that waits or pauses; then its head and a ping are sent, as proxies end "
        "silent ones (nginx after 60 s). Refusals before it have their own status. 0: no pings.",
        unit="s",
        low=0,
        high=3600,
    )
    idle_connection_s: float = setting(
        620.0,
        help="How long an idle HTTP connection stays open. Longer than at balancers (Google's: 600 s): where both "
        "close it at once, a request is lost. Idle ones give way to new ones all the same.",
        unit="s",
        low=0.1,
        high=86_400,
    )
    grpc_connection_age_s: float = setting(
        300.0,
        help="Age at which a gRPC connection takes no new calls: clients dial again, and new gateways get their share. "
        "Calls under way end as they would; 0: none.",
        unit="s",
        low=0,
        high=86_400,
    )
    verifier_silence_s: float = setting(
        15.0,
        # A verifier with nothing else to send gives a sign of life every second (`verifier/verifier_host.py`).
        help="Longest silence of a verifier while it has a session, before the session continues elsewhere.",
        unit="s",
        low=2.0,
    )
    max_wait_s: float = setting(
        30.0,
        help="Longest expected wait for a place at a verifier; requests that would wait longer get status 429.",
        unit="s",
        low=0,
        high=86_400,
    )
    failover_s: float = setting(
        30.0,
        help="How long a session that lost its verifier looks for another before it fails.",
        unit="s",
        low=0,
        high=3600,
    )
    otlp_traces_endpoint: str = setting("", help=ENDPOINT_HELP)
    trace_sample_ratio: float = setting(
        0.1, help="Share of requests that are traced; a caller's traceparent decides for its own.", low=0, high=1
    )
    refresh_s: float = setting(0.5, help="Pause between two readings of the registry.", unit="s", low=0.05)
    record_interval_s: float = setting(0.5, help="Pause between two writings of session records.", unit="s", low=0.05)
    record_ttl_s: float = setting(600.0, help="Life of a session record after its last change.", unit="s", low=1)
    response_ttl_s: float = setting(
        86_400.0, help="Life of a response of /v1/responses that is kept.", unit="s", low=1, high=31 * 86_400
    )
    response_room_bytes: int = setting(
        64 * 1024 * 1024,
        help="Room in the store for all kept responses; where it ends, the key that keeps most loses its oldest. A "
        "sixteenth of it is the most that one may take with its conversation.",
        unit="bytes",
        low=1024 * 1024,
        high=1 << 40,
    )
    console: bool = setting(
        True,
        help="Serve the console at /, with live figures of the fleet and a playground, and the API's page at /docs.",
    )
    grace_s: float = setting(
        15.0, help="Time that running sessions get to finish on SIGTERM.", unit="s", low=0, high=3600
    )

    def __post_init__(self) -> None:
        check_host("--host", self.host)
        check_families(self.tool_call_parser, self.reasoning_parser)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together; give both or neither")
        for proxy in self.forwarded_allow_ips:
            _check_proxy(proxy, alone=len(self.forwarded_allow_ips) == 1)


def _check_proxy(proxy: str, *, alone: bool) -> None:
    """Refuses what would never be the address of a proxy, such as a name."""
    try:
        if proxy != "*" or not alone:
            ip_network(proxy)
    except ValueError as error:
        raise ConfigError(f"--forwarded-allow-ips must be addresses, networks, or * alone: {error}") from None


def model_aliases(given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the model behind each further name.

    Args:
        given: ALIAS, where there is one model, or ALIAS=NAME.
        names: Names of the models.

    Raises:
        ConfigError: It is unclear which model is meant, the model is not served, or a name has two meanings.
    """
    aliases: dict[str, str] = {}
    for each in given:
        alias, separator, name = each.partition("=")
        if not separator and len(names) > 1:
            raise ConfigError(f"--served-model-name {each}: of several models, say which: {each}=NAME")
        name = name if separator else names[0]
        if not alias or name not in names:
            raise ConfigError(f"--served-model-name {each}: must be ALIAS=NAME, NAME one of {', '.join(names)}")
        if aliases.setdefault(alias, name) != name or (alias in names and alias != name):
            raise ConfigError(f"--served-model-name {each}: {alias!r} is the name of another model as well")
    return aliases


def model_folders(models: Sequence[str], model_name: str) -> dict[str, Path]:
    """Returns the tokenizer folder of each served name; what the Hub has of it is fetched.

    Args:
        models: FOLDER or NAME=FOLDER, the folder as `paceline.checkpoints.source` takes it.
        model_name: Name for a single FOLDER; empty: its own.

    Raises:
        ConfigError: No model is given, a name is given twice, `model_name` comes with several models, or one cannot be
            fetched.
    """
    if not models:
        raise ConfigError("--model is required: a checkpoint folder with the tokenizer of the served model")
    if model_name and len(models) > 1:
        raise ConfigError("--model-name is for one --model only; write NAME=FOLDER for each of several")
    folders: dict[str, Path] = {}
    for given in models:
        with named("--model", given):
            # A folder of that very name wins, since "=" may stand in a path.
            before, separator, after = ("", "", "") if Path(given).is_dir() else given.partition("=")
        folder = folder_of(after if separator else given, "--model", files=TEXT_FILES)
        name = model_name or (before if separator else served_name(folder))
        if name in folders:
            raise ConfigError(f"--model names {name!r} twice")
        folders[name] = folder
    return folders
