"""Any device of torch's as a platform: torch operations."""

from __future__ import annotations

import platform
from functools import partial

import torch
from typing_extensions import override

from paceline.core.messages import CUDA_ARITHMETIC
from paceline.engine.backends.interface import Attention, Platform
from paceline.engine.backends.torch.attention import plan_attention, write_and_attend
from paceline.engine.backends.torch.backend import TorchBackend
from paceline.engine.backends.torch.kv import TorchKVCache
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.linear import Head, Linear
from paceline.engine.llama import LlamaWeights


class TorchPlatform(Platform):
    """Runs on a device of torch's, with torch's own linears."""

    packs, linear, head = False, Linear, Head

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @override
    def arithmetic(self) -> str:
        if self.device.type == "cuda":
            place = f"{CUDA_ARITHMETIC}{torch.version.cuda} on {torch.cuda.get_device_name(self.device)}"
        else:
            place = f"{self.device.type} {platform.machine()}"
        return f"{place}, torch {torch.__version__}"

    @override
    def new_cache(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, state_width: int) -> TorchKVCache:
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, num_blocks)
        return TorchKVCache(*shape, self.device, dtype, state_width)

    @override
    def attention(self, batch: Batch) -> Attention:
        slots = torch.from_numpy(batch.slots).to(self.device)
        return partial(write_and_attend, slots, plan_attention(batch, self.device))

    @override
    def llama(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> TorchBackend:
        return TorchBackend(self, config, shape, weights)
