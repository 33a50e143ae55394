"""CUDA as a platform: torch's linears, our kernels between them."""

from __future__ import annotations

from importlib.metadata import version

import torch
from typing_extensions import override

from paceline.core.messages import CUDA_ARITHMETIC
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cuda.attention import attend
from paceline.engine.backends.cuda.backend import CudaBackend
from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.plan import PlanFields, StepBuffer, aligned_bytes, field_arrays
from paceline.engine.backends.cuda.stream import Stream
from paceline.engine.backends.interface import Attention, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.layers import Head, Linear, LlamaWeights


class CudaPlatform(Platform):
    """Runs on a device of CUDA's, with torch's own linears.

    Args:
        stream: CUDA stream that steps run on; by default the device's.
    """

    packs, linear, head = False, Linear, Head

    def __init__(self, device: torch.device, stream: Stream | None = None) -> None:
        self.device, self._stream = device, stream or Stream(device)

    @property
    @override
    def arithmetic(self) -> str:
        card = torch.cuda.get_device_name(self.device)
        return f"{CUDA_ARITHMETIC}{torch.version.cuda} on {card}, torch {torch.__version__}, triton {version('triton')}"

    @override
    def new_cache(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, state_width: int) -> CudaKVCache:
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, num_blocks)
        return CudaKVCache(*shape, self.device, dtype, state_width)

    @override
    def attention(self, batch: Batch) -> Attention:
        return _GenericAttention(batch, self._stream).attend

    @override
    def llama(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> CudaBackend:
        return CudaBackend(self, config, shape, weights, self._stream)


class _GenericAttention:
    """Attention of a batch between modules that are not ours; its rows go to the device when the first layer asks."""

    def __init__(self, batch: Batch, stream: Stream) -> None:
        self._batch, self._stream = batch, stream
        self._rows: PlanFields | None = None

    def attend(
        self,
        query: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """An `Attention`."""
        if self._rows is None:
            arrays = field_arrays(self._batch, self._batch.num_rows, values.shape[1], 0)
            self._rows = PlanFields.of(StepBuffer(self._stream, sum(map(aligned_bytes, arrays.values()))).send(arrays))
        slots = self._rows.slots
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        keys[block, :, :, offset] = new_keys.to(keys.dtype)
        values[block, :, offset] = new_values.to(values.dtype)
        attended = attend(self._rows.lanes, query.to(keys.dtype).contiguous(), keys.transpose(-1, -2), values, scale)
        return attended.to(query.dtype)
