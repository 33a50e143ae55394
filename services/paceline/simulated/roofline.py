"""Profiles by arithmetic, from published bandwidth and FLOP/s: computed, not measured.

A step of `r` rows takes

    max(weight bytes / (n * bandwidth), 2 * parameters * r / (n * FLOP/s)) + launch + 2 * layers * all-reduce (n > 1)

seconds on `n` GPUs that reach the shares `REACHED_BANDWIDTH` and `REACHED_FLOPS` of what is published, plus the KV it
reads over the same bandwidth. KV takes what weights and a reserve leave of the memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.profile import COMPUTED, DeviceFacts, DrafterFacts, Profile

REACHED_BANDWIDTH, REACHED_FLOPS = 0.75, 0.6
# Seconds of a step that are neither weights nor arithmetic, of an all-reduce, and of the host for each session.
LAUNCH_S, ALL_REDUCE_S, SESSION_S = 5e-4, 1e-5, 1e-5
# A GPU's memory: the share in use, and the bytes for activations and scratch.
USED_MEMORY, RESERVE_BYTES = 0.9, 2e9
TABLE_ROWS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048)
MOST_DEVICES = 8
# A host beside the other, and a gateway in front.
LINK_S, DOOR_S = 2e-4, 3e-3
NOISE, OVERHEAD = 0.05, 0.02
# Bytes of a weight, by what stands behind a model's size.
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
MOST_PARAMETERS = 2e12

_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?)b(?:-({'|'.join(WEIGHT_BYTES)}))?")
_NAME = re.compile(r"([^+@]+)\+([^+@]+)@(?:([0-9]+)x)?([^+@]+)\+([^+@]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its data sheet has it, dense bfloat16; the price is an example."""

    name: str
    bytes_per_s: float
    flops: float
    memory_bytes: float
    price_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model's sizes; the KV cache is in bfloat16."""

    name: str
    parameters: float
    layers: int
    kv_bytes_per_token: int
    bytes_per_weight: float = 2.0

    @property
    def weight_bytes(self) -> float:
        return self.bytes_per_weight * self.parameters


GPUS = {
    "h100": Gpu(name="H100 SXM", bytes_per_s=3.35e12, flops=989e12, memory_bytes=80e9, price_per_hour=3.0),
    "h200": Gpu(name="H200 SXM", bytes_per_s=4.8e12, flops=989e12, memory_bytes=141e9, price_per_hour=3.8),
    "a100": Gpu(name="A100 80GB SXM", bytes_per_s=2.039e12, flops=312e12, memory_bytes=80e9, price_per_hour=1.8),
    "l40s": Gpu(name="L40S", bytes_per_s=0.864e12, flops=362e12, memory_bytes=48e9, price_per_hour=1.2),
    "l4": Gpu(name="L4", bytes_per_s=0.3e12, flops=121e12, memory_bytes=24e9, price_per_hour=0.6),
}
# Shapes of Qwen2.5, Qwen3 and Llama 3; other sizes take layers and KV of the nearest.
MODELS = {
    "0.5b": ModelSize(name="0.5B", parameters=0.49e9, layers=24, kv_bytes_per_token=12_288),
    "0.6b": ModelSize(name="0.6B", parameters=0.6e9, layers=28, kv_bytes_per_token=114_688),
    "1b": ModelSize(name="1B", parameters=1.24e9, layers=16, kv_bytes_per_token=32_768),
    "1.7b": ModelSize(name="1.7B", parameters=1.72e9, layers=28, kv_bytes_per_token=114_688),
    "4b": ModelSize(name="4B", parameters=4.02e9, layers=36, kv_bytes_per_token=147_456),
    "8b": ModelSize(name="8B", parameters=8.03e9, layers=32, kv_bytes_per_token=131_072),
    "14b": ModelSize(name="14B", parameters=14.8e9, layers=40, kv_bytes_per_token=163_840),
    "32b": ModelSize(name="32B", parameters=32.8e9, layers=64, kv_bytes_per_token=262_144),
    "70b": ModelSize(name="70B", parameters=70.6e9, layers=80, kv_bytes_per_token=327_680),
}


def computed_profile(name: str) -> Profile:
    """The profile of `TARGET+DRAFT@GPU+GPU`, such as `70b+1b@4xh100+h100` or `32b-fp8+0.6b@h100+l40s`.

    Raises:
        ConfigError: The name is in another form, or one of its parts is not known or does not fit.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"profile {name!r} is no file, and not in the form TARGET+DRAFT@VERIFIER_GPU+DRAFTER_GPU")
    target, draft = _model(match[1]), _model(match[2])
    count = int(match[3] or 1)
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(f"profile {name!r}: a target takes from 1 to {MOST_DEVICES} GPUs, got {count}")
    large, small = _gpu(match[4]), _gpu(match[5])
    return Profile(
        name=f"{target.name} on {count} x {large.name}, {draft.name} on {small.name}",
        kind=COMPUTED,
        origin="roofline of published bandwidth and FLOP/s; acceptance assumed",
        target=DeviceFacts(**_device(target, large, count), max_sessions=256),
        drafter=_drafter(draft, small, 1),
        colocated=_drafter(draft, large, count),
        colocated_kv_tokens=_kv_tokens(target, large, count, beside=draft),
        acceptance=GuessLaw(),
        drafting_overhead=OVERHEAD,
        link_s=LINK_S,
        door_s=DOOR_S,
    )


def _model(name: str) -> ModelSize:
    """A model of any number of parameters, `14b`, and of any width of its weights, `14b-fp8`."""
    match = _SIZE.fullmatch(name.lower())
    if match is None or not 0 < (parameters := float(match[1]) * 1e9) <= MOST_PARAMETERS:
        raise ConfigError(
            f"no model {name!r} is known: write its billions of parameters, up to {MOST_PARAMETERS / 1e9:g}, and how "
            f"its weights are stored ({', '.join(WEIGHT_BYTES)}; bf16 if not said): 14b, 0.6b, 70b-fp8"
        )
    known = MODELS.get(f"{match[1]}b")
    if known is None:
        nearest = min(MODELS.values(), key=lambda each: abs(math.log(each.parameters / parameters)))
        known = replace(nearest, name=f"{match[1]}B", parameters=parameters)
    if match[2] is None:
        return known
    return replace(known, name=f"{known.name} {match[2].upper()}", bytes_per_weight=WEIGHT_BYTES[match[2]])


def _gpu(name: str) -> Gpu:
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"no GPU {name!r} is known; there are {', '.join(GPUS)}")
    return found


def _drafter(model: ModelSize, gpu: Gpu, count: int) -> DrafterFacts:
    return DrafterFacts(
        **_device(model, gpu, count), max_sessions=1024, draft_width=3, draft_rows=128, draft_rows_per_session=4
    )


def _device(model: ModelSize, gpu: Gpu, count: int) -> dict[str, Any]:
    """Facts of a device by the names of `DeviceFacts`."""
    bytes_per_s = REACHED_BANDWIDTH * gpu.bytes_per_s * count
    flops = REACHED_FLOPS * gpu.flops * count
    fixed_s = LAUNCH_S + (2 * model.layers * ALL_REDUCE_S if count > 1 else 0.0)
    weights_s = model.weight_bytes / bytes_per_s
    return {
        "name": gpu.name,
        "rows": TABLE_ROWS,
        "seconds": tuple(max(weights_s, 2 * model.parameters * rows / flops) + fixed_s for rows in TABLE_ROWS),
        "num_devices": count,
        "price_per_hour": gpu.price_per_hour,
        "session_s": SESSION_S,
        "kv_token_s": model.kv_bytes_per_token / bytes_per_s,
        "noise": NOISE,
        "kv_tokens": _kv_tokens(model, gpu, count),
        "max_rows": TABLE_ROWS[-1],
    }


def _kv_tokens(model: ModelSize, gpu: Gpu, count: int, beside: ModelSize | None = None) -> int:
    """Tokens that fit beside the weights; with another model beside, each token takes the KV of both."""
    weight_bytes = model.weight_bytes + (beside.weight_bytes if beside else 0.0)
    per_token = model.kv_bytes_per_token + (beside.kv_bytes_per_token if beside else 0)
    left = count * (USED_MEMORY * gpu.memory_bytes - RESERVE_BYTES) - weight_bytes
    if left < per_token:
        raise ConfigError(
            f"{model.name} does not fit {count} x {gpu.name} ({gpu.memory_bytes / 1e9:g} GB each); take more of them, "
            f"or weights of one byte ({model.name.partition(' ')[0].lower()}-fp8)"
        )
    return int(left // per_token)
