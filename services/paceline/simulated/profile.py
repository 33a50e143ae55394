"""Facts that a plan stands on: what steps take on which device, what guesses are worth, what all of it costs.

A profile is a JSON file; `docs/capacity.md` names its keys. Whether its figures were measured or computed is one of
them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from paceline.checkpoints.json_files import read_object
from paceline.core.errors import ConfigError
from paceline.core.step_time import KNOTS, StepCost
from paceline.core.target_events import TargetLimits
from paceline.engine.draft_scheduler import DraftLimits
from paceline.service.config import from_mapping, setting
from paceline.simulated.guesses import GuessLaw

MEASURED, COMPUTED = "measured", "computed"


# Without slots, so that a property can be kept.
@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A replica of a model on its device."""

    name: str = setting(help="Of the device, as in H100.")
    rows: tuple[int, ...] = setting(help="Rows of the steps that `seconds` are of.")
    seconds: tuple[float, ...] = setting(help="Time of a step by its rows.")
    num_devices: int = setting(1, help="GPUs of a replica.", low=1)
    price_per_hour: float = setting(0.0, help="Price of one of these, in any currency.", low=0)
    session_s: float = setting(0.0, help="Seconds of a step for each session in it, beside its rows.", low=0)
    kv_token_s: float = setting(0.0, help="Seconds of a step for each token of KV that it reads.", low=0)
    noise: float = setting(0.0, help="Standard deviation of the logarithm of a step's time.", low=0)
    kv_tokens: int = setting(32_768, help="Tokens whose KV it holds.", low=1)
    max_sessions: int = setting(64, help="Most sessions that run at once.", low=1)
    max_rows: int = setting(512, help="Most rows of a step, prefill included.", low=1)

    @cached_property
    def cost(self) -> StepCost:
        """Seconds of a step by its rows; raises `ConfigError` if the two columns do not fit."""
        return StepCost(rows=self.rows, seconds=self.seconds)

    def step_s(self, rows: int, *, num_sessions: int, kv_tokens: int = 0) -> float:
        """Expected time of a step."""
        if not rows:
            return 0.0
        return self.cost.at(rows) + self.session_s * num_sessions + self.kv_token_s * kv_tokens

    def starting_cost(self) -> StepCost:
        """Step costs as a measurement at start-up would find them: one row a session, and no KV."""
        rows = tuple(count for count in KNOTS if count <= max(4, self.max_rows))
        return StepCost(rows=rows, seconds=tuple(self.step_s(count, num_sessions=1) for count in rows))

    @property
    def target_limits(self) -> TargetLimits:
        """Bounds of a target's engine."""
        return TargetLimits(max_num_seqs=self.max_sessions, max_num_batched_tokens=self.max_rows)

    @property
    def replica_price_per_hour(self) -> float:
        return self.num_devices * self.price_per_hour


@dataclass(frozen=True, kw_only=True)
class DrafterFacts(DeviceFacts):
    """A draft model on its device, and how it drafts."""

    draft_width: int = setting(3, help="As `paceline drafter --draft-width`.", low=1)
    draft_rows: int = setting(0, help="As `paceline drafter --draft-rows`.", low=0)
    draft_rows_per_session: int = setting(4, help="As `paceline drafter --draft-rows-per-session`.", low=1)

    @property
    def limits(self) -> DraftLimits:
        return DraftLimits(
            width=self.draft_width,
            max_rows=self.draft_rows,
            max_rows_per_session=self.draft_rows_per_session,
            max_num_batched_tokens=self.max_rows,
            max_num_seqs=self.max_sessions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All facts of a pair of models on its hardware."""

    name: str = setting(help="Name in tables.")
    kind: str = setting(help="Whether it was measured or computed.", choices=(MEASURED, COMPUTED))
    origin: str = setting(help="Where the figures come from, in a sentence.")
    target: DeviceFacts = setting(help="The target model.")
    drafter: DrafterFacts = setting(help="The draft model on a device of its own.")
    colocated: DrafterFacts = setting(help="The draft model on the target's devices.")
    colocated_kv_tokens: int = setting(
        help="Tokens of KV that a drafter on the target's devices leaves the target.", low=1
    )
    acceptance: GuessLaw = setting(help="The drafter's guesses, and whether they are right.")
    drafting_overhead: float = setting(
        0.0, help="Share by which the target's steps take longer while drafters work.", low=0
    )
    link_s: float = setting(0.0002, help="Seconds from a verifier to a drafter, and as many back.", low=0)
    door_s: float = setting(0.002, help="Seconds that a request and its first token spend outside the verifier.", low=0)
    most_nodes: int = setting(12, help="Most draft tokens of a session that a step verifies.", low=0, high=64)

    def __post_init__(self) -> None:
        """Checks the step costs of its devices.

        Raises:
            ConfigError: The columns of one of them do not fit.
        """
        for name, facts in (("target", self.target), ("drafter", self.drafter), ("colocated", self.colocated)):
            try:
                _ = facts.cost
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None

    def sharing(self) -> Profile:
        """Returns the same with the drafter on the target's devices, where it takes room that was the target's."""
        left = min(self.target.kv_tokens, self.colocated_kv_tokens)
        return replace(self, target=replace(self.target, kv_tokens=left))


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        ConfigError: It cannot be read, or a key is missing, unknown or outside its limits; the message names it.
    """
    try:
        return from_mapping(Profile, read_object(path), "")
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile's file."""
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")
