"""Decoders: a batch of rows in, float32 logits out. The lean one for the Llama family lives here.

A decoder knows nothing of sessions, trees or sampling: rows, slots and block tables are all it sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.errors import ConfigError
from paceline.engine.attention import attend_rows
from paceline.engine.batch import Batch
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.compiled_layers import CompiledLayers
from paceline.engine.config import (
    LEAN_ARCHITECTURES,
    DecoderConfig,
    LlamaShape,
    architecture_of,
    read_transformers_config,
)
from paceline.engine.graphs import Capture, GraphCache
from paceline.engine.kernels import add_rms_norm_rows, project_rows, rms_norm_rows, silu_mul_rows
from paceline.engine.kv import KVCache, as_array
from paceline.engine.linear import Linear, has_native_bfloat16, row_counts, rows_computed
from paceline.engine.llama import Head, LlamaLayer, LlamaReader, LlamaWeights
from paceline.engine.ranks import Ranks
from paceline.engine.rope import RopeTable
from paceline.engine.states import NO_STATES, StateLayout
from paceline.engine.static_batch import bucket_rows, plan_static
from paceline.engine.static_step import StaticStep, default_capture
from paceline.engine.torch_attention import TorchKVCache, plan_attention, run_attention
from paceline.engine.torch_layers import TorchLayers, TorchRows

logger = logging.getLogger(__name__)

Layers = tuple[int, ...] | None
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Decoder(Protocol):
    """A causal language model over paged KV.

    Attributes:
        config: Sizes and limits.
        device: Where logits and cache lie.
        dtype: Of the weights.
        hidden_size: Width of the final hidden states.
        weight_bytes: What one step reads of the weights.
        feature_width: Numbers of `Batch.features` a row; 0: it takes tokens alone.
        states: What steps keep of each row beside its KV.
    """

    feature_width: int
    states: StateLayout
    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    weight_bytes: int

    @property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The language model head: final hidden states, float32 [rows, hidden], to logits, float32 [rows, vocab]."""
        ...

    def keep_states(self, layout: StateLayout) -> None:
        """From now on caches have room for such states, and steps write them; none unless this is called."""
        ...

    def forward(self, batch: Batch, cache: KVCache, layers: Layers = None) -> torch.Tensor:
        """Writes the rows' KV and states, and returns float32 logits [k, vocab] of `batch.logit_rows`, in that order.

        Args:
            batch: Rows.
            cache: Their KV.
            layers: Runs these layers alone, in this order, and keeps no states; None runs all.
        """
        ...

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty cache of the right shape."""
        ...

    def prepare(self, max_rows: int) -> None:
        """Makes at once, and before memory is accounted for, what steps of up to so many rows need."""
        ...

    def rows_computed(self, rows: int) -> int:
        """Rows that a step of so many computes: kernels and recorded steps round up."""
        ...


class _CompiledLayer:
    """A layer with its norms as arrays."""

    __slots__ = ("down", "gate_up", "input_norm", "key_norm", "out", "post_norm", "qkv", "query_norm")

    def __init__(self, layer: LlamaLayer) -> None:
        self.qkv, self.out = layer.qkv.raw, layer.out.raw
        self.gate_up, self.down = layer.gate_up.raw, layer.down.raw
        self.input_norm, self.post_norm = layer.input_norm.numpy(), layer.post_norm.numpy()
        self.query_norm, self.key_norm = layer.query_norm.numpy(), layer.key_norm.numpy()


class LlamaDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 with as little as possible between the linear layers.

    On the CPU the rows go through compiled loops and packed linears, each row's bits independent of the
    others; elsewhere, or with `compiled=False`, through torch operations. There, batches that fit a bucket run
    as steps of static shape (on CUDA: as graphs), larger ones in groups. The residual stream is float32.

    Args:
        config: Sizes.
        shape: More of them.
        weights: Packed, on the device where steps are to run.
        compiled: Whether to use the compiled loops; by default on the CPU.
        static: Whether to pad batches to static shapes if not compiled; by default on CUDA.
        capture: How static steps are recorded; by default as CUDA graphs on CUDA, and not at all elsewhere.
    """

    feature_width = 0

    def __init__(
        self,
        config: DecoderConfig,
        shape: LlamaShape,
        weights: LlamaWeights,
        *,
        compiled: bool | None = None,
        static: bool | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.weight_bytes = weights.head.nbytes + sum(layer.nbytes for layer in weights.layers)
        self._weights = weights
        self._inner = shape.intermediate_size
        self._eps = shape.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._rope = RopeTable(shape.rope)
        self.dtype = weights.embedding.dtype
        self.hidden_size = shape.hidden_size
        self._compiled = self.device.type == "cpu" if compiled is None else compiled
        self._layers = [_CompiledLayer(layer) for layer in weights.layers] if self._compiled else []
        self._whole: CompiledLayers | None = None
        if self._compiled and CompiledLayers.are_possible(weights.layers, shape.hidden_size):
            eps, scale = np.float32(self._eps), np.float32(self._scale)
            self._whole = CompiledLayers(weights.layers, self._inner, eps, scale)
        self._torch_layers = None if self._compiled else self._make_torch_layers(config, shape, weights)
        self._static = self.device.type == "cuda" if static is None else static
        self._capture = capture
        self._step: StaticStep | None = None
        self.states = NO_STATES

    def _make_torch_layers(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> TorchLayers:
        return TorchLayers(config, shape, weights)

    def keep_states(self, layout: StateLayout) -> None:
        """See `Decoder`."""
        self.weight_bytes += layout.nbytes - self.states.nbytes
        self.states = layout
        if self._torch_layers is not None:
            self._torch_layers.states = layout

    @property
    def graphs(self) -> GraphCache | None:
        """Recorded steps over the cache used last; None without any."""
        return None if self._step is None else self._step.graphs

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty cache of `num_blocks` blocks."""
        config = self.config
        kind = KVCache if self._compiled else TorchKVCache
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, num_blocks)
        return kind(*shape, self.device, self.dtype, self.states.width)

    @property
    def head(self) -> Head:
        """See `Decoder`."""
        return self._weights.head

    def linears(self) -> list[Linear]:
        """Every packed linear of a step, in the order in which it runs them."""
        return [each for layer in self._weights.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]

    def share(self, layers: Sequence[int]) -> float:
        """Of the weights that a step reads, what a pass through some layers and the head reads."""
        linears = self.linears()
        per_layer = len(linears) // self.config.num_layers
        read = sum(each.nbytes for index in layers for each in linears[per_layer * index :][:per_layer])
        return (self.head.nbytes + read) / self.weight_bytes

    @torch.inference_mode()
    def prepare(self, max_rows: int) -> None:
        """Compiles the packed linears of steps of up to so many rows; layers of one shape share them."""
        if not self._compiled:
            return
        for count in row_counts(max_rows, self.dtype):
            for layer in self.linears()[:4]:
                layer.raw(torch.zeros(count, layer.in_features, dtype=layer.dtype))

    def rows_computed(self, rows: int) -> int:
        """See `Decoder`."""
        if self._compiled:
            return rows_computed(rows, self.dtype)
        return bucket_rows(rows) if self._static else rows

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, layers: Layers = None) -> torch.Tensor:
        """See `Decoder`."""
        if self._torch_layers is None:
            return self._forward_compiled(batch, cache, layers)
        if self._static and isinstance(cache, TorchKVCache):
            plan = plan_static(batch)
            if plan is not None:
                return self._static_step(self._torch_layers, cache).run(plan, batch, layers)
        return self._forward_grouped(self._torch_layers, batch, cache, layers)

    def _rows_buffer(self, rows: int, width: int) -> tuple[torch.Tensor, npt.NDArray[Any]]:
        """Input of a packed linear, padded, and the array of its real rows."""
        tensor = torch.zeros((rows_computed(rows, self.dtype), width), dtype=self.dtype)
        return tensor, as_array(tensor)[:rows]

    def _forward_compiled(self, batch: Batch, cache: KVCache, layers: Layers) -> torch.Tensor:
        residual, entering = self._enter(batch)
        wanted = range(len(self._layers)) if layers is None else layers
        run = self._run_one_by_one if self._whole is None else self._run_whole
        delta, tapped = run(wanted, batch, cache, residual, entering)
        eps = np.float32(self._eps)
        if layers is not None or not self.states.width:
            return self._weights.head(self._final(residual[batch.logit_rows], delta[batch.logit_rows], eps))
        final = self._final(residual, delta[: batch.num_rows], eps)
        tapped[len(self._layers)] = torch.from_numpy(residual)
        return self._head_and_states(batch, cache, final, tapped)

    def _run_whole(
        self,
        wanted: Sequence[int],
        batch: Batch,
        cache: KVCache,
        residual: npt.NDArray[Any],
        entering: torch.Tensor | None,
    ) -> tuple[npt.NDArray[Any], dict[int, torch.Tensor]]:
        """As `_run_one_by_one`, in one call."""
        assert self._whole is not None, "the caller asked"
        assert entering is None, "such layers take the residual stream"
        taps = [index for index in wanted if index in self.states.taps]
        rope, kv = self._rope.rows(batch.positions), (as_array(cache.keys), as_array(cache.values))
        heads, arrays = self.config.num_heads, batch.attention_arrays
        delta, tapped = self._whole.run(wanted, residual, taps, rope, batch.slots, arrays, kv, heads)
        return delta, dict(zip(taps, torch.from_numpy(tapped), strict=True))

    def _run_one_by_one(
        self,
        wanted: Sequence[int],
        batch: Batch,
        cache: KVCache,
        residual: npt.NDArray[Any],
        entering: torch.Tensor | None,
    ) -> tuple[npt.NDArray[Any], dict[int, torch.Tensor]]:
        """Runs layers; returns what is still to be added to the residual stream, and that before the tapped ones."""
        config, rows, eps = self.config, batch.num_rows, np.float32(self._eps)
        scale, arrays = np.float32(self._scale), batch.attention_arrays
        cos, sin = self._rope.rows(batch.positions)
        query = np.empty((rows, config.num_heads, config.head_dim), dtype=np.float32)
        normed, normed_rows = self._rows_buffer(rows, residual.shape[1])
        attended, attended_rows = self._rows_buffer(rows, config.num_heads * config.head_dim)
        activated, activated_rows = self._rows_buffer(rows, self._inner)
        tapped: dict[int, torch.Tensor] = {}
        delta = None
        for index in wanted:
            layer, (keys, values) = self._layers[index], cache.layers[index]
            if delta is not None:
                add_rms_norm_rows(residual, delta, layer.input_norm, eps, normed_rows)
                entering = normed
            elif entering is None:
                rms_norm_rows(residual, layer.input_norm, eps, normed_rows)
                entering = normed
            if index in self.states.taps:
                tapped[index] = torch.from_numpy(residual.copy())
            qkv = as_array(layer.qkv(entering))
            norms = (layer.query_norm, layer.key_norm)
            project_rows(qkv, *norms, eps, cos, sin, batch.slots, keys, values, query)
            attend_rows(query, keys, values, arrays, scale, attended_rows)
            add_rms_norm_rows(residual, as_array(layer.out(attended)), layer.post_norm, eps, normed_rows)
            silu_mul_rows(as_array(layer.gate_up(normed)), activated_rows)
            delta = as_array(layer.down(activated))
        assert delta is not None, "at least one layer runs"
        return delta, tapped

    def _head_and_states(
        self, batch: Batch, cache: KVCache, final: torch.Tensor, tapped: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        cache.keep_states(torch.from_numpy(batch.slots), self.states.states(tapped, final))
        return self._weights.head(final[torch.from_numpy(batch.logit_rows)])

    def _enter(self, batch: Batch) -> tuple[npt.NDArray[Any], torch.Tensor | None]:
        """The residual stream [rows, hidden] before the first layer, and what that layer takes if not its norm."""
        token_ids = torch.from_numpy(batch.token_ids)
        return torch.nn.functional.embedding(token_ids, self._weights.embedding).float().numpy(), None

    def _final(self, residual: npt.NDArray[Any], delta: npt.NDArray[Any], eps: np.float32) -> torch.Tensor:
        """Final hidden states of rows, float32 [rows, hidden]."""
        final = np.empty_like(residual)
        add_rms_norm_rows(residual, delta, self._weights.final_norm.numpy(), eps, final)
        return torch.from_numpy(final)

    def _forward_grouped(self, torch_layers: TorchLayers, batch: Batch, cache: KVCache, layers: Layers) -> torch.Tensor:
        fields = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
        token_ids, positions, slots, wanted = (torch.from_numpy(field).to(self.device) for field in fields)
        features = None if batch.features is None else torch.from_numpy(batch.features).to(self.device)
        rows = TorchRows(token_ids=token_ids, positions=positions, slots=slots, logit_rows=wanted, features=features)
        plan = plan_attention(batch, self.device)
        return torch_layers.forward(rows, cache, partial(run_attention, plan, scale=self._scale), layers)

    def _static_step(self, layers: TorchLayers, cache: TorchKVCache) -> StaticStep:
        """Graphs belong to one cache: those of another one go when it is used for the first time."""
        if self._step is None or self._step.cache is not cache:
            self._capture = self._capture or default_capture(self.device)
            self._step = StaticStep(self.config, layers, cache, self._capture)
        return self._step


def choose_device(device: str) -> torch.device:
    """Where to compute.

    Raises:
        ConfigError: The name is none of those known, or there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or auto, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but this machine has no usable GPU; use cpu or auto")
    return torch.device(device)


def choose_dtype(dtype: str, checkpoint: Checkpoint, place: torch.device) -> torch.dtype:
    """Returns the type that a checkpoint's weights are served in; "auto" takes none that the place only emulates.

    Raises:
        ConfigError: The name is none of those known.
    """
    if dtype == "auto":
        kinds = {checkpoint.tensor(name).dtype for name in checkpoint.names if "embed" in name}
        stored_wide = kinds <= {torch.float32, torch.float64}
        return torch.float32 if stored_wide or _emulates_bfloat16(place) else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be bfloat16, float32 or auto, got {dtype!r}")
    return _DTYPES[dtype]


def _emulates_bfloat16(place: torch.device) -> bool:
    return place.type == "cpu" and not has_native_bfloat16()


def load_decoder(
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    ranks: Ranks | None = None,
) -> Decoder:
    """Loads a checkpoint folder.

    Args:
        folder: In the Hugging Face format, with safetensors.
        dtype: Of the weights: "bfloat16", "float32" or "auto" (as stored; float16 becomes bfloat16, and both float32
            on a CPU that only emulates bfloat16).
        device: "cpu", "cuda" or "auto" (CUDA if there is one).
        num_threads: CPU threads of the linear layers, for the whole process; None leaves torch's choice.
        ranks: Those that share the model, and say where this one computes; None: all of it is here.

    Raises:
        ConfigError: The folder or a setting makes serving impossible; says what to do.
    """
    place = choose_device(device) if ranks is None else ranks.device
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    described = read_transformers_config(folder)
    config = DecoderConfig.from_transformers(described, folder)
    checkpoint = Checkpoint(folder)
    kind = choose_dtype(dtype, checkpoint, place)
    if kind is torch.bfloat16 and _emulates_bfloat16(place):
        logger.warning(
            "this CPU emulates bfloat16: slow, and with several threads tokens may depend on the batch; "
            "--dtype auto takes float32, which is neither, for twice the memory"
        )
    if ranks is None and architecture_of(described, folder) not in LEAN_ARCHITECTURES:
        from paceline.engine.generic import GenericDecoder

        return GenericDecoder.load(folder, config, kind, place)
    shape = LlamaShape.from_transformers(described, config.head_dim)
    if ranks is None:
        decoder = LlamaDecoder(config, shape, LlamaReader(checkpoint, config, shape, kind, place).read())
    else:
        from paceline.engine.sharded_decoder import load_part

        decoder = load_part(checkpoint, config, shape, kind, ranks)
    if ranks is None or ranks.rank == 0:
        warm_up(decoder)
    return decoder


def warm_up(decoder: Decoder) -> None:
    """Runs one row and one copy, so that no request waits for compilation (0.2 s, 15 s the first time ever)."""
    row, one, none = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    batch = Batch(
        token_ids=row,
        positions=row,
        slots=row,
        sequences=none,
        context_lens=one,
        ancestors=np.zeros((1, 0), dtype=np.int32),
        num_ancestors=none,
        block_tables=np.zeros((1, 1), dtype=np.int32),
        logit_rows=row,
        features=np.zeros((1, decoder.feature_width), dtype=np.float32) if decoder.feature_width else None,
    )
    cache = decoder.new_cache(1)
    decoder.forward(batch, cache)
    cache.copy_slots(row, row + 1)
