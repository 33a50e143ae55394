"""Settings of `python -m loadtest load`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.planning.arrivals import SHAPES
from paceline.service.config import setting

ADAPTIVE, OFF, ON = "adaptive", "off", "on"
MODES = (OFF, ON, ADAPTIVE)
ALL = "all"
HTTP, GRPC = "http", "grpc"
# A rate: the trace as it is.
TRACE = "trace"
TRACES = (
    "Azure's CSV of 2023 (Azure/AzurePublicDataset on GitHub, data/AzureLLMInferenceTrace_conv.csv or _code.csv, "
    "CC-BY-4.0) or Mooncake's JSON lines (kvcache-ai/Mooncake, FAST25-release/traces), plain or gzipped"
)
PROMPT_SETS = (
    "question.jsonl of Spec-Bench (hemingkx/Spec-Bench) or MT-bench (lm-sys/FastChat), or HumanEval.jsonl "
    "(openai/human-eval), plain or gzipped"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings of a replay."""

    url: str = setting(
        "", help="Gateway to load, http://host:port or, with --door grpc, host:port; without it fleets of its own."
    )
    door: str = setting(HTTP, help="Door of the gateway.", choices=(HTTP, GRPC))
    trace: Path | None = setting(None, help=f"Arrivals and lengths to replay: {TRACES}; without it they are generated.")
    shape: str = setting("conversation", help="Statistics of generated arrivals.", choices=tuple(SHAPES))
    prompts: Path | None = setting(
        None, help=f"Prompts to send: {PROMPT_SETS}; without it unseen Python source, as long as the trace says."
    )
    minutes: float = setting(2.0, help="Length of the replay, for each mode.", unit="minutes", low=0.01, high=1440)
    rate: str = setting(
        "1",
        help="Requests a second on average over the replay, the trace's clock stretched to it; trace: as it is.",
    )
    speculation: str = setting(
        ADAPTIVE,
        help="off: requests ask for none; on: a fixed number of draft tokens whatever the load; adaptive: as served; "
        "all: all three on the same requests, in turn. With --url, on and adaptive are as the fleet was started.",
        choices=(*MODES, ALL),
    )
    gamma: int = setting(4, help="Draft tokens a step and session of mode on.", low=1, high=64)
    prompt_scale: float = setting(0.125, help="Factor on the trace's prompt lengths.", low=0.0001, high=1.0)
    output_scale: float = setting(0.5, help="Factor on the trace's output lengths.", low=0.0001, high=1.0)
    max_prompt_tokens: int = setting(1024, help="Longer prompts are clipped to this.", low=1)
    max_output_tokens: int = setting(512, help="Longer outputs are clipped to this.", low=1)
    temperature: float = setting(0.8, help="0 is greedy.", low=0.0, high=100.0)
    seed: int = setting(1, help="Of generated arrivals, of prompts and of sampling.", low=0)
    window_s: float = setting(
        60.0, help="Stretch of the replay that one mode runs before the next has its turn.", unit="seconds", low=1.0
    )
    slot_s: float = setting(
        10.0, help="Stretches that are sorted into low, mid and high load.", unit="seconds", low=0.1
    )
    warmup_s: float = setting(
        10.0, help="Unmeasured load on each fleet before the first window.", unit="seconds", low=0
    )
    model: Path | None = setting(
        None, help="Checkpoint folder of the target, and the tokenizer prompts are cut with; without it the demo pair."
    )
    draft_model: Path | None = setting(None, help="Checkpoint folder of the draft model of own fleets.")
    dtype: str = setting("auto", help="Weight type of own fleets.", choices=("auto", "bfloat16", "float32"))
    lend: bool = setting(
        True, help="Let verifiers of own fleets use the drafters' CPUs while these rest, as `paceline up` does."
    )
    out: Path = setting(Path("reports/load"), help="Where the figures go: this name with .json.")

    def __post_init__(self) -> None:
        """Checks what goes together.

        Raises:
            ConfigError: `rate` is no rate, or all modes are asked of one fleet.
        """
        if self.rate != TRACE and not self._is_rate():
            raise ConfigError(f"--rate must be a number above 0 or trace, got {self.rate!r}")
        if self.rate == TRACE and self.trace is None:
            raise ConfigError("--rate trace needs --trace")
        if self.url and self.speculation == ALL:
            raise ConfigError(
                "--speculation all needs fleets of its own, so that no mode finds another's prompts in the prefix "
                "cache; with --url choose one mode"
            )

    @property
    def duration_s(self) -> float:
        """Length of the replay, each mode."""
        return self.minutes * 60.0

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes to run, in the order of tables."""
        return MODES if self.speculation == ALL else (self.speculation,)

    def _is_rate(self) -> bool:
        try:
            return 0.0 < float(self.rate) < 1e6
        except ValueError:
            return False
