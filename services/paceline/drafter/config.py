"""Settings of a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config import check_address, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Flags and environment variables of `paceline drafter`."""

    model: Path = setting(help="Checkpoint folder of the draft model, in Hugging Face layout, or of an EAGLE-3 head.")
    target_model: Path | None = setting(
        None, help="Checkpoint folder of the target, for an EAGLE-3 head: embedding and vocabulary are the target's."
    )
    model_name: str = setting("", help="Name shown in the registry; empty: the folder's name.")
    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(8201, help="gRPC port; 0 picks a free one.", low=0, high=65535)
    announce: str = setting(
        "", help="host:port other services reach this one at, such as a proxy's; empty: host and port it listens on."
    )
    tls_dir: Path | None = setting(
        None,
        help="Folder with ca.pem, tls.pem and tls.key: mutual TLS between the tiers; without it plain text.",
    )
    health_port: int = setting(
        0, help="Plain-text gRPC port for health alone, for probes without a certificate; 0: none.", low=0, high=65535
    )
    metrics_port: int = setting(8202, help="Prometheus port; 0 picks a free one.", low=0, high=65535)
    redis_url: str = setting("redis://127.0.0.1:6379", help="Registry; memory:// for none.")
    replica_id: str = setting("", help="Name of this replica in the registry; empty: role and address.")
    otlp_traces_endpoint: str = setting(
        "", help="OTLP collector that takes traces over gRPC, http://host:port or https://host:port; empty: no traces."
    )
    dtype: str = setting(
        "auto",
        help="Weight type; auto: as stored, but float32 where a CPU only emulates bfloat16.",
        choices=("auto", "bfloat16", "float32"),
    )
    device: str = setting("auto", help="Where the model runs.", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, help="Threads of a forward pass on the CPU.", low=1, high=1024)
    cpus: str = setting("", help="CPU numbers to keep to, such as 0,2-3; empty: all.")
    idle_priority: bool = setting(
        False, help="Once loaded, take only CPU time that nobody else wants; for CPUs shared with a verifier."
    )
    num_kv_blocks: int = setting(4096, help="Pages of 16 tokens for committed KV.", low=8, high=10_000_000)
    max_num_seqs: int = setting(256, help="Most sessions drafted for.", low=1, high=65536)
    max_num_batched_tokens: int = setting(256, help="Most rows of a step.", unit="tokens", low=16, high=65536)
    draft_width: int = setting(
        8, help="Children a node gets at most; 1 grows chains, more grow trees.", unit="nodes", low=1, high=16
    )
    draft_rows: int = setting(
        16,
        help="Most tree nodes expanded in one step, all sessions together.",
        unit="nodes",
        low=1,
        high=4096,
    )
    draft_rows_per_session: int = setting(
        4,
        help="Most tree nodes of one session expanded in one step; 1 is strictly best-first.",
        unit="nodes",
        low=1,
        high=64,
    )
    engine_stall_s: float = setting(
        60.0,
        help="Time inside one step after which the engine counts as hung, and the process ends; on CPUs that others "
        "want, too, a step may take long.",
        unit="s",
        low=1,
        high=3600,
    )

    def __post_init__(self) -> None:
        """Checks the address that others are told."""
        if self.announce:
            check_address("--announce", self.announce)
