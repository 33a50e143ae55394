"""A CPU as a platform: compiled loops, packed linears."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import torch
from typing_extensions import override

from paceline.engine.backends.cpu.attention import write_and_attend
from paceline.engine.backends.cpu.backend import CpuBackend
from paceline.engine.backends.cpu.kv import CpuKVCache
from paceline.engine.backends.cpu.linear import PackedHead, PackedLinear
from paceline.engine.backends.cpu.simd import FUSES
from paceline.engine.backends.interface import Attention, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.layers import LlamaWeights
from paceline.kernel_cache import ARITHMETIC, PACKAGE, sources_hash


class CpuPlatform(Platform):
    """Runs on the CPU, with linears that are packed once."""

    packs, linear, head = True, PackedLinear, PackedHead

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @property
    def arithmetic(self) -> str:
        """Names the versions.

        All CPUs with fused multiply-add count as one: our kernels fix the order and the rounding of every sum, whatever
        instructions they use.
        """
        kernels = f"kernels {sources_hash(PACKAGE, ARITHMETIC)}, numba {version('numba')}"
        return f"cpu{'' if FUSES else ' without fused multiply-add'}, {kernels}, torch {torch.__version__}"

    @override
    def new_cache(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, state_width: int) -> CpuKVCache:
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, num_blocks)
        return CpuKVCache(*shape, dtype, state_width)

    @override
    def attention(self, batch: Batch) -> Attention:
        return partial(write_and_attend, batch)

    @override
    def llama(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> CpuBackend:
        return CpuBackend(self, config, shape, weights)
