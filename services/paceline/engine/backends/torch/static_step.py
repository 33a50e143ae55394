"""Steps of static shape over one cache: stage a batch, run its bucket's graph, read the logits once."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from paceline.engine.backends.interface import Layers
from paceline.engine.backends.torch.graphs import Capture, CudaCapture, GraphCache, Unrecorded
from paceline.engine.backends.torch.kv import TorchKVCache
from paceline.engine.backends.torch.lane_attention import attend_lanes, build_lanes
from paceline.engine.backends.torch.layers import TorchLayers
from paceline.engine.backends.torch.static_batch import MAX_ROWS, Bucket, StaticInputs, StaticPlan
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig
from paceline.engine.hidden_states import StateLayout

MAX_GRAPHS: Final = 128


def default_capture(device: torch.device) -> Capture:
    """CUDA graphs where there is CUDA."""
    return CudaCapture(device) if device.type == "cuda" else Unrecorded()


class StaticStep:
    """Runs batches that fit a bucket.

    Args:
        cache: Where KV lies; graphs hold its addresses.
        capture: How steps are recorded.
    """

    def __init__(self, config: DecoderConfig, layers: TorchLayers, cache: TorchKVCache, capture: Capture) -> None:
        self.cache = cache
        self.graphs = GraphCache(capture, MAX_GRAPHS)
        self._layers = layers
        self._group = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._inputs = StaticInputs(cache.device, cache.trash_block)
        # Outside of the graphs, or each of them would keep logits of its own.
        self._logits = torch.empty((MAX_ROWS, config.vocab_size), dtype=torch.float32, device=cache.device)

    def run(self, plan: StaticPlan, batch: Batch, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        """Writes the rows' KV and states, and returns float32 logits [k, vocab] on the host, the caller's to keep."""
        self._inputs.stage(plan, batch)
        self.graphs.run((plan.bucket, layers), partial(self._compute, plan.bucket, kept, layers))
        return _read(self._logits[: len(batch.logit_rows)])

    def _compute(self, bucket: Bucket, kept: StateLayout, layers: Layers = None) -> None:
        """From the staged inputs to `_logits[: bucket.rows]`; recorded, so nothing here may look at a value."""
        inputs = self._inputs.views(bucket)
        lanes = build_lanes(inputs, group=self._group, dtype=self.cache.keys.dtype)
        attend = partial(attend_lanes, lanes, scale=self._scale)
        self._logits[: bucket.rows].copy_(self._layers.forward(inputs.rows, self.cache, attend, kept, layers))


def _read(logits: torch.Tensor) -> torch.Tensor:
    """A copy on the host: the one time in a step that the host waits for the device."""
    if logits.device.type == "cpu":
        return logits.clone()
    # torch keeps freed pinned memory for the next step.
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return host
