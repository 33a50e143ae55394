"""Any other causal language model: transformers' modules with our attention in its attention interface.

Slower than the lean decoder (module by module), and rows may differ in their last bits between batches.
Nothing is taken on trust: while loading, the model runs a short text through transformers' own attention and
through ours, in chunks and as a tree, and is refused when the logits differ. What a short text cannot show
(sliding windows, frequencies that depend on length) is refused or limited by its config.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.attention import paged_attention, write_kv
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig
from paceline.engine.kv import KVCache
from paceline.engine.linear import HeadLinear, Linear, rows_computed
from paceline.engine.rope import LENGTH_DEPENDENT
from paceline.engine.states import NO_STATES, StateLayout
from paceline.engine.torch_attention import GroupPlan, plan_attention, run_attention

# What models may hand to an attention function without changing what it computes. A sliding window changes
# nothing, because DecoderConfig.context_len never exceeds it.
_HARMLESS: Final = frozenset(
    {"dropout", "is_causal", "output_attentions", "output_hidden_states", "position_ids", "sliding_window", "use_cache"}
)
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_serial = itertools.count()


class _PackedLinear(torch.nn.Module):
    """A packed linear in the place of a torch module; any leading dimensions."""

    def __init__(self, linear: Linear | HeadLinear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], float32."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self._linear(rows).view(*hidden.shape[:-1], -1)


def _packed_form(module: torch.nn.Module, is_head: bool, dtype: torch.dtype) -> Linear | HeadLinear | None:
    if isinstance(module, Conv1D):
        return Linear(module.weight.detach().t().to(dtype), module.bias.detach())
    # Subclasses of torch's own may compute something else.
    if type(module) is not torch.nn.Linear:
        return None
    bias: torch.Tensor | None = module.bias
    weight = module.weight.detach().to(dtype)
    if is_head and bias is None:
        return HeadLinear(weight)
    return Linear(weight, bias)


def _pack(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Replaces linear modules by packed ones; returns what a step reads of them, in bytes."""
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    total = 0
    for name, module in list(model.named_modules()):
        packed = _packed_form(module, module is head, dtype)
        if packed is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _PackedLinear(packed))
            total += packed.nbytes
    return total


class GenericDecoder:
    """A transformers model behind the `Decoder` protocol; use `load`."""

    feature_width = 0

    def __init__(self, model: PreTrainedModel, config: DecoderConfig) -> None:
        """Takes a model in eval mode; its attention is ours from here on."""
        self.config = config
        self.device = model.device
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._model = model
        self.dtype = model.dtype
        self.hidden_size = int(model.config.hidden_size)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.states = NO_STATES
        self._step: tuple[Batch, KVCache, torch.Tensor, list[GroupPlan]] | None = None
        name = f"paceline-{next(_serial)}"
        AttentionInterface.register(name, self._attend)
        model.set_attn_implementation(name)

    @classmethod
    def load(cls, folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> GenericDecoder:
        """Loads and tries out a checkpoint.

        On the CPU activations are float32 and linear weights `dtype`, packed; elsewhere everything is
        `dtype`.

        Raises:
            ConfigError: The model cannot be served faithfully; says why.
        """
        on_cpu = device.type == "cpu"
        model = _load_model(folder, torch.float32 if on_cpu else dtype)
        model.to(device)  # type: ignore[arg-type]
        _refuse_by_config(model.config, config)
        token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 3 * BLOCK_SIZE // 2)
        try:
            with torch.inference_mode():
                expected = model(torch.from_numpy(token_ids)[None].to(device), use_cache=False).logits[0].float()
            decoder = cls(model, config)
            found = decoder._try_out(token_ids)
        except ConfigError:
            raise
        except Exception as error:
            # Whatever a foreign model raises here means that it cannot be served.
            raise _refusal(config, f"it fails with paged attention: {error!r}") from error
        distance = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not distance < _TOLERANCE[torch.float32 if on_cpu else dtype]:
            raise _refusal(config, f"its logits with paged attention differ from transformers' by {distance:.1e}")
        if on_cpu:
            decoder.dtype = dtype
            packed = _pack(model, dtype)
            rest = sum(parameter.nbytes for parameter in model.parameters())
            decoder.weight_bytes = packed + rest - _embedding_bytes(model)
        return decoder

    def prepare(self, max_rows: int) -> None:
        """Nothing: these layers keep nothing that depends on the number of rows."""

    def rows_computed(self, rows: int) -> int:
        """See `Decoder`."""
        return rows_computed(rows, self._model.dtype) if self.device.type == "cpu" else rows

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty cache of `num_blocks` blocks."""
        config = self.config
        return KVCache(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_blocks,
            self.device,
            self._model.dtype,
            self.states.width,
        )

    def keep_states(self, layout: StateLayout) -> None:
        """See `Decoder`.

        Raises:
            ConfigError: The output of the last layer is asked for, which transformers does not hand out.
        """
        if self.config.num_layers - 1 in layout.layers:
            raise _refusal(self.config, "the output of its last layer cannot be kept")
        self.weight_bytes += layout.nbytes - self.states.nbytes
        self.states = layout

    @torch.inference_mode()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Decoder`.

        Raises:
            ConfigError: The model has no head of its own.
        """
        module: torch.nn.Module | None = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if module is None:
            raise _refusal(self.config, "it has no language model head to draft with")
        logits: torch.Tensor = module(rows.to(self._model.dtype))
        return logits.to(torch.float32)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, layers: tuple[int, ...] | None = None) -> torch.Tensor:
        """See `Decoder`.

        Raises:
            ConfigError: `layers` names some of them: these modules run as a whole.
        """
        if layers is not None:
            raise _refusal(self.config, "its layers cannot be run one by one, as layer_skip does")
        plan = [] if self.device.type == "cpu" else plan_attention(batch, self.device)
        wanted = torch.from_numpy(batch.logit_rows).to(self.device)
        options: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_rows else {}
        self._step = (batch, cache, torch.from_numpy(batch.slots).to(self.device), plan)
        try:
            output = self._model(
                input_ids=torch.from_numpy(batch.token_ids)[None].to(self.device),
                position_ids=torch.from_numpy(batch.positions)[None].to(self.device),
                use_cache=False,
                output_hidden_states=bool(self.states.width),
                **options,
            )
        finally:
            self._step = None
        logits: torch.Tensor = output.logits[0]
        if self.states.width:
            streams = [stream[0].to(torch.float32) for stream in output.hidden_states]
            states = self.states.states(dict(enumerate(streams)), streams[-1])
            cache.keep_states(torch.from_numpy(batch.slots).to(self.device), states)
        return (logits if self._keeps_rows else logits[wanted]).to(torch.float32)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention function of transformers: query [1, H, rows, D], key and value [1, G, rows, D]."""
        asked = {name for name, option in options.items() if option is not None and option is not False} - _HARMLESS
        if asked or attention_mask is not None:
            raise _refusal(self.config, f"its attention needs {sorted(asked) or ['a mask of its own']}")
        if self._step is None:
            raise _refusal(self.config, "its attention ran outside a step")
        batch, cache, slots, plan = self._step
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = cache.keys[layer], cache.values[layer]
        query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        if key.shape[1:] != keys.shape[1:3] or value.shape[1:] != (values.shape[1], values.shape[3]):
            raise _refusal(self.config, f"its keys and values have shapes {key.shape[1:]} and {value.shape[1:]}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        write_kv(keys, values, slots, key, value)
        if self.device.type == "cpu":
            return paged_attention(query, keys, values, batch, scale)[None], None
        return run_attention(plan, query, keys, values, scale)[None], None

    def _try_out(self, token_ids: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Logits of all positions: a chunk, then a tree path beside a sibling and another session."""
        first = len(token_ids) * 2 // 3
        cache = self.new_cache(6)
        table = np.array([[4, 1], [0, 3]], dtype=np.int32)
        positions = np.arange(first)
        chunk = self.forward(_prompt_batch(token_ids[:first], table[:1], positions), cache)
        path = np.arange(first, len(token_ids))
        slots = 2 * BLOCK_SIZE + np.arange(len(path))
        ancestors = np.tile(slots.astype(np.int32), (len(path) + 2, 1))
        ancestors[0] = 5 * BLOCK_SIZE
        batch = Batch(
            token_ids=np.concatenate([token_ids[1:2], token_ids[first:], token_ids[:1]]),
            positions=np.concatenate([[first], path, [0]]),
            slots=np.concatenate([[5 * BLOCK_SIZE], slots, [table[1, 0] * BLOCK_SIZE]]).astype(np.int64),
            sequences=np.array([0] * (1 + len(path)) + [1], dtype=np.int32),
            context_lens=np.array([first] * (1 + len(path)) + [1], dtype=np.int32),
            ancestors=ancestors,
            num_ancestors=np.array([1, *range(1, 1 + len(path)), 0], dtype=np.int32),
            block_tables=table,
            logit_rows=np.arange(1, 1 + len(path)),
        )
        logits = torch.cat([chunk, self.forward(batch, cache)])
        unused = [layer for layer in range(self.config.num_layers) if not cache.keys[layer].any()]
        if unused:
            raise _refusal(self.config, f"its layers {unused} do not go through transformers' attention interface")
        return logits


def _prompt_batch(token_ids: Any, table: Any, positions: Any) -> Batch:
    rows = len(token_ids)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=table[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        sequences=np.zeros(rows, dtype=np.int32),
        context_lens=(positions + 1).astype(np.int32),
        ancestors=np.zeros((rows, 0), dtype=np.int32),
        num_ancestors=np.zeros(rows, dtype=np.int32),
        block_tables=table,
        logit_rows=np.arange(rows),
    )


def _embedding_bytes(model: PreTrainedModel) -> int:
    """Of the token embedding, of which a step reads a few rows only."""
    return sum(parameter.nbytes for parameter in model.get_input_embeddings().parameters())


def _refusal(config: DecoderConfig, reason: str) -> ConfigError:
    return ConfigError(f"{config.architecture} ({config.model_type}) cannot be served: {reason}")


def _load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"{folder} cannot be loaded by transformers: {error}") from error
    model.train(False)
    return model


def _refuse_by_config(described: PretrainedConfig, config: DecoderConfig) -> None:
    """Refuses what a short text cannot show to be wrong."""
    rope: dict[str, Any] = getattr(described, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    unsteady = {str(part.get("rope_type")) for part in parts} & LENGTH_DEPENDENT
    if unsteady:
        raise _refusal(config, f"rope_type {sorted(unsteady)} depends on the longest sequence of the batch")
    known = {"full_attention", "sliding_attention"}
    other = {str(kind) for kind in getattr(described, "layer_types", None) or []} - known
    if other:
        raise _refusal(config, f"layer_types {sorted(other)} keep state that is not paged KV")
