"""Settings of a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.model_service import ModelServiceConfig
from paceline.service.config import setting

PACELINE, SIMULATED = "paceline", "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig(ModelServiceConfig):
    model: Path = setting(
        help="Draft model or EAGLE-3 head: ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub, or a folder."
    )
    target_model: Path | None = setting(
        None, help="The target, named likewise, for an EAGLE-3 head: embedding and vocabulary are the target's."
    )
    engine: str = setting(
        PACELINE,
        help="Engine that runs the model; simulated computes nothing, and takes the time that --profile says.",
        choices=(PACELINE, SIMULATED),
    )
    profile: str = setting(
        "", help="Simulated devices: a profile's file, or a name such as 70b+1b@4xh100+h100; see docs/simulation.md."
    )
    acceptance: float | None = setting(
        None, help="Simulated guesses: chance that the first one is right; without it the profile's law.", low=0, high=1
    )
    port: int = 8201
    metrics_port: int = 8202
    idle_priority: bool = setting(
        False, help="Once loaded, take only CPU time that nobody else wants; for CPUs shared with a verifier."
    )
    max_num_seqs: int = setting(256, help="Most sessions drafted for.", low=1, high=65536)
    max_num_batched_tokens: int = 256
    draft_width: int = setting(
        8, help="Children a node gets at most; 1 grows chains, more grow trees.", unit="nodes", low=1, high=16
    )
    draft_rows: int = setting(
        0,
        help="Most tree nodes at which one step begins, all sessions together; 0: one for each session, and at least "
        "16.",
        unit="nodes",
        low=0,
        high=4096,
    )
    draft_rows_per_session: int = setting(
        4,
        help="Most tree nodes of one session expanded in one step; 1 is strictly best-first.",
        unit="nodes",
        low=1,
        high=64,
    )
    # On CPUs that others want, too, a step may take long.
    engine_stall_s: float = 60.0

    def __post_init__(self) -> None:
        ModelServiceConfig.__post_init__(self)
        if (self.engine == SIMULATED) != bool(self.profile):
            raise ConfigError(f"--engine {SIMULATED} and --profile need one another")
