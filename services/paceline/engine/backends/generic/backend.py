"""Any other causal language model: transformers' modules with our attention in its attention interface.

Slower than those of the Llama family (module by module), and rows may differ in their last bits between batches.
Nothing is taken on trust: while loading, the model runs a short text through transformers' own attention and
through ours, in chunks and as a tree, and is refused when the logits differ. Features that a short text cannot show
(sliding windows, frequencies that depend on length) is refused or limited by its config.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages
from paceline.engine.backends.interface import Attention, Backend, Layers, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig
from paceline.engine.hidden_states import NO_STATES, StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.layers import Head, Linear
from paceline.engine.packing import BatchBuilder, PrefixRows, TreeRow
from paceline.service.config import reason

# Arguments that models may hand to an attention function without changing its result. A sliding window changes
# nothing, because DecoderConfig.context_len never exceeds it.
_HARMLESS: Final = frozenset(
    {"dropout", "is_causal", "output_attentions", "output_hidden_states", "position_ids", "sliding_window", "use_cache"}
)
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_serial = itertools.count()


class _PackedLinear(torch.nn.Module):
    """A packed linear in the place of a torch module; any leading dimensions."""

    def __init__(self, linear: Linear | Head) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], float32."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self._linear(rows).view(*hidden.shape[:-1], -1)


def _packed_form(
    module: torch.nn.Module, is_head: bool, dtype: torch.dtype, platform: Platform
) -> Linear | Head | None:
    if isinstance(module, Conv1D):
        return platform.linear(module.weight.detach().t().to(dtype), module.bias.detach())
    # Subclasses of torch's own may compute something else.
    if type(module) is not torch.nn.Linear:
        return None
    bias: torch.Tensor | None = module.bias
    weight = module.weight.detach().to(dtype)
    if is_head and bias is None:
        return platform.head(weight)
    return platform.linear(weight, bias)


def _pack(model: PreTrainedModel, dtype: torch.dtype, platform: Platform) -> int:
    """Replaces linear modules by packed ones; returns what a step reads of them, in bytes."""
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    total = 0
    for name, module in list(model.named_modules()):
        packed = _packed_form(module, module is head, dtype, platform)
        if packed is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _PackedLinear(packed))
            total += packed.nbytes
    return total


class GenericBackend(Backend):
    """A transformers model; use `load`."""

    def __init__(self, model: PreTrainedModel, config: DecoderConfig, platform: Platform) -> None:
        """Takes a model in eval mode, on the platform's device; its attention is ours from here on."""
        self.platform, self.config, self.dtype = platform, config, model.dtype
        self.hidden_size = int(model.config.hidden_size)
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._model = model
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._step: tuple[KVCache, Attention] | None = None
        name = f"paceline-{next(_serial)}"
        AttentionInterface.register(name, self._attend)
        model.set_attn_implementation(name)

    @classmethod
    def load(cls, folder: Path, config: DecoderConfig, dtype: torch.dtype, platform: Platform) -> GenericBackend:
        """Loads and tries out a checkpoint.

        On a platform that packs, activations are float32 and linear weights `dtype`; elsewhere everything is `dtype`.

        Raises:
            ConfigError: The model cannot be served faithfully; says why.
        """
        kind = torch.float32 if platform.packs else dtype
        model = _load_model(folder, kind)
        model.to(platform.device)  # type: ignore[arg-type]
        token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 3 * BLOCK_SIZE // 2)
        try:
            _refuse_by_config(model.config, config)
            with torch.inference_mode():
                expected = (
                    model(torch.from_numpy(token_ids)[None].to(platform.device), use_cache=False).logits[0].float()
                )
                backend = cls(model, config, platform)
                found = backend._try_out(token_ids)
            distance = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
            if not distance < _TOLERANCE[kind]:
                raise _refusal(config, f"its logits with paged attention differ from transformers' by {distance:.1e}")
        except ConfigError as error:
            raise ConfigError(f"{error}: use --engine vllm") from error
        except Exception as error:
            # Any error that a foreign model raises here means that it cannot be served.
            raise _refusal(config, f"it fails with paged attention ({error!r}): use --engine vllm") from error
        if platform.packs:
            backend.dtype = dtype
            packed = _pack(model, dtype, platform)
            rest = sum(parameter.nbytes for parameter in model.parameters())
            backend.weight_bytes = packed + rest - _embedding_bytes(model)
        return backend

    @override
    def new_cache(self, num_blocks: int, state_width: int) -> KVCache:
        return self.platform.new_cache(self.config, num_blocks, self._model.dtype, state_width)

    def check_states(self, layout: StateLayout) -> None:
        """Refuses the output of the last layer.

        Raises:
            ConfigError: The output of the last layer is asked for, which transformers does not hand out.
        """
        if self.config.num_layers - 1 in layout.layers:
            raise _refusal(self.config, "the output of its last layer cannot be kept")

    @torch.inference_mode()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits by the model's own head.

        Raises:
            ConfigError: The model has no head of its own.
        """
        module: torch.nn.Module | None = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if module is None:
            raise _refusal(self.config, "it has no language model head to draft with")
        logits: torch.Tensor = module(rows.to(self._model.dtype))
        return logits.to(torch.float32)

    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        """Runs the model's own modules, with our attention.

        Raises:
            ConfigError: `layers` names some of them: these modules run as a whole.
        """
        if layers is not None:
            raise _refusal(self.config, "its layers cannot be run one by one, as layer_skip does")
        cache.flush()
        device = self.platform.device
        wanted = torch.from_numpy(batch.logit_rows).to(device)
        options: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_rows else {}
        self._step = (cache, self.platform.attention(batch))
        try:
            output = self._model(
                input_ids=torch.from_numpy(batch.token_ids)[None].to(device),
                position_ids=torch.from_numpy(batch.positions)[None].to(device),
                use_cache=False,
                output_hidden_states=bool(kept.width),
                **options,
            )
        finally:
            self._step = None
        logits: torch.Tensor = output.logits[0]
        if kept.width:
            streams = [stream[0].to(torch.float32) for stream in output.hidden_states]
            states = kept.states(dict(enumerate(streams)), streams[-1])
            cache.keep_states(torch.from_numpy(batch.slots).to(device), states)
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
        cache, attend = self._step
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = cache.keys[layer], cache.values[layer]
        query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        if key.shape[1:] != keys.shape[1:3] or value.shape[1:] != (values.shape[1], values.shape[3]):
            raise _refusal(self.config, f"its keys and values have shapes {key.shape[1:]} and {value.shape[1:]}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, keys, values, scale)[None], None

    def _try_out(self, token_ids: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Logits of all positions: a chunk, then a tree path beside a sibling and another session."""
        tokens, first, cache = token_ids.tolist(), len(token_ids) * 2 // 3, self.new_cache(6, 0)
        pages, other = SessionPages(tokens, BlockPool(0)), SessionPages(tokens, BlockPool(0))
        pages.blocks, other.blocks = [4, 1], [0, 3]
        chunk, tree = BatchBuilder(), BatchBuilder()
        chunk.add_prefixes([PrefixRows(pages, 0, first)])
        slots = range(2 * BLOCK_SIZE, 2 * BLOCK_SIZE + len(tokens) - first)
        path = [TreeRow(pages, tokens[first + depth], first + depth, slots[: depth + 1]) for depth in range(len(slots))]
        tree.add_nodes([TreeRow(pages, tokens[1], first, (5 * BLOCK_SIZE,)), *path])
        tree.add_prefixes([PrefixRows(other, 0, 1)])
        prompt = self.forward(replace(chunk.build(), logit_rows=np.arange(first)), cache, NO_STATES)
        logits = torch.cat([prompt, self.forward(tree.build(), cache, NO_STATES)[1:]])
        unused = [layer for layer in range(self.config.num_layers) if not cache.keys[layer].any()]
        if unused:
            raise _refusal(self.config, f"its layers {unused} do not go through transformers' attention interface")
        return logits


def _embedding_bytes(model: PreTrainedModel) -> int:
    """Bytes of the token embedding, of which a step reads a few rows only."""
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
    # Each family raises what it likes.
    except Exception as error:
        raise ConfigError(f"{folder} cannot be loaded by transformers: {reason(error)}") from error
    model.train(False)
    return model


def _refuse_by_config(described: PretrainedConfig, config: DecoderConfig) -> None:
    """Refuses what a short text cannot show to be wrong."""
    known = {"full_attention", "sliding_attention"}
    other = {str(kind) for kind in getattr(described, "layer_types", None) or []} - known
    if other:
        raise _refusal(config, f"layer_types {sorted(other)} keep state that is not paged KV")
