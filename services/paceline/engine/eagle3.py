"""EAGLE-3 heads (Li et al. 2503.01840): one layer that drafts from the target's own hidden states.

A row takes the embedding of a token and a feature of the position before it: the target's low, middle and high hidden
states, fused to one vector, or in a drafted row the head's own output for its parent. The fusion runs in the verifier,
so that the wire carries one vector a token; the rest runs wherever drafts are made. The layout is SafeAILab's, which
SpecForge writes, too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PretrainedConfig
from typing_extensions import override

from paceline.checkpoints.families import (
    EAGLE3_ARCHITECTURE,
    describes_eagle3,
    eagle3_refusal,
    is_eagle3,
)
from paceline.checkpoints.json_files import read_object
from paceline.checkpoints.source import served_name
from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.engine.backends.interface import Platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig, LlamaShape, read_transformers_config
from paceline.engine.decoder import Decoder
from paceline.engine.hidden_states import StateLayout
from paceline.engine.layers import Head, LlamaWeights, rope_frequencies
from paceline.engine.llama_reader import HEAD, LlamaReader
from paceline.engine.loading import choose_dtype, choose_platform, load_decoder, model_identity, warm_up

NUM_TAPS: Final = 3
HASH_CHARS: Final = 32
# Prefix of the layer's tensors.
LAYER: Final = "midlayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A head as its checkpoint folder describes it.

    Attributes:
        folder: Where it lies.
        sizes: Sizes of its layer, as a Llama's config.json has them.
        draft_vocab_size: Ids that it can guess; None: all of its target's.
        layer_ids: Layers of the target whose outputs are fused; None: those of the paper.
    """

    folder: Path
    sizes: dict[str, Any]
    draft_vocab_size: int | None
    layer_ids: tuple[int, ...] | None

    @classmethod
    def from_folder(cls, folder: Path) -> EagleConfig:
        """Reads config.json.

        Raises:
            ConfigError: It is unreadable, of no EAGLE-3 head, or has an option that is not served.
        """
        config = read_object(folder / "config.json")
        if not describes_eagle3(config):
            raise ConfigError(f"{folder} is no EAGLE-3 head: its config.json does not name {EAGLE3_ARCHITECTURE}")
        if refused := eagle3_refusal(config, folder / "config.json"):
            raise ConfigError(refused)
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return cls(
            folder=folder,
            sizes=config,
            draft_vocab_size=config.get("draft_vocab_size") or config.get("vocab_size"),
            layer_ids=None if ids is None else tuple(ids),
        )

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target of `num_layers` layers whose outputs are fused.

        Raises:
            ConfigError: The target lacks one of them.
        """
        layers = (1, num_layers // 2 - 1, num_layers - 4) if self.layer_ids is None else self.layer_ids
        if len(layers) != NUM_TAPS or not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(
                f"eagle_aux_hidden_state_layer_ids: must be {NUM_TAPS} of the target's {num_layers} layers, "
                f"got {list(layers)} ({self.folder})"
            )
        return layers

    def decoder_config(self, target: DecoderConfig) -> DecoderConfig:
        """Sizes of the head as a decoder of one layer over the target's vocabulary."""
        heads = self.sizes["num_attention_heads"]
        return DecoderConfig(
            model_type="eagle3",
            architecture=EAGLE3_ARCHITECTURE,
            vocab_size=target.vocab_size,
            context_len=target.context_len,
            longest_context_len=target.longest_context_len,
            eos_token_ids=target.eos_token_ids,
            num_layers=1,
            num_heads=heads,
            num_kv_heads=self.sizes.get("num_key_value_heads") or heads,
            head_dim=self.sizes.get("head_dim") or self.sizes["hidden_size"] // heads,
        )


def states_hash(folder: Path) -> str:
    """Fingerprint of the fusion: verifier and drafter must have the same.

    Raises:
        ConfigError: The folder holds no EAGLE-3 head.
    """
    config = EagleConfig.from_folder(folder)
    fusion = Checkpoint(folder).tensor("fc.weight")
    digest = hashlib.sha256(repr((config.layer_ids, tuple(fusion.shape))).encode())
    digest.update(fusion.float().numpy().tobytes())
    return digest.hexdigest()[:HASH_CHARS]


def load_fusion(folder: Path, target: Decoder) -> StateLayout:
    """The verifier's part of a head: which hidden states the target keeps, and how they are fused.

    Raises:
        ConfigError: The folder holds no EAGLE-3 head, or one for another target.
    """
    config, hidden = EagleConfig.from_folder(folder), target.hidden_size
    layers = config.taps(target.config.num_layers)
    weight = Checkpoint(folder).tensor("fc.weight", (config.sizes["hidden_size"], NUM_TAPS * hidden))
    fuse = target.platform.linear(weight.to(device=target.device, dtype=target.dtype))
    return replace(target.states, hidden_size=hidden, layers=layers, fuse=fuse)


def load_eagle3(
    folder: Path, target: Path, dtype: str = "auto", device: str = "auto", num_threads: int | None = None
) -> Decoder:
    """The drafter's part of a head, as a decoder; the states that it keeps are the features of the rows below.

    Args:
        folder: The head's folder.
        target: Checkpoint folder of the target, for embedding and rotary frequencies.
        dtype: As in `load_decoder`; "auto" is the target's.
        device: As in `load_decoder`.
        num_threads: As in `load_decoder`.

    Raises:
        ConfigError: A folder is no such checkpoint, or they do not fit together.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    decoder = read_eagle3(folder, target, dtype, choose_platform(device))
    warm_up(decoder)
    return decoder


def read_eagle3(folder: Path, target: Path, dtype: str, platform: Platform) -> Decoder:
    """As `load_eagle3`, on a platform."""
    eagle, of_target = EagleConfig.from_folder(folder), read_transformers_config(target)
    config = eagle.decoder_config(DecoderConfig.from_transformers(of_target, target))
    shape = _shape(eagle, of_target, config.head_dim)
    target_checkpoint, checkpoint = Checkpoint(target), Checkpoint(folder)
    kind = choose_dtype(dtype, target_checkpoint)
    hidden = shape.hidden_size
    reader = LlamaReader(checkpoint, config, shape, kind, platform)
    of_the_target = LlamaReader(target_checkpoint, config, shape, kind, platform)
    embedding = of_the_target.embedding((config.vocab_size, hidden))
    draft_ids = _draft_ids(checkpoint, eagle, config.vocab_size)
    if checkpoint.has(HEAD):
        head_weight = reader.weight(HEAD, (eagle.draft_vocab_size or config.vocab_size, hidden))
    else:
        head_weight = of_the_target.head_weight(embedding)
        head_weight = head_weight if draft_ids is None else head_weight[draft_ids.to(head_weight.device)]
    head = platform.head(head_weight)
    weights = LlamaWeights(
        embedding=embedding,
        layers=(reader.layer(LAYER, 2 * hidden),),
        final_norm=reader.norm("norm.weight", hidden),
        head=head if draft_ids is None else DraftHead(head, draft_ids.to(platform.device), config.vocab_size),
        feature_norm=reader.norm(f"{LAYER}.hidden_norm.weight", hidden),
    )
    decoder = Decoder(platform.llama(config, shape, weights))
    decoder.keep_states(StateLayout(hidden_size=hidden, layers=(0,)))
    return decoder


def _shape(eagle: EagleConfig, target: PretrainedConfig, head_dim: int) -> LlamaShape:
    """Sizes of the head's layer; rotary frequencies are the target's, since configs of heads carry wrong ones."""
    return LlamaShape(
        hidden_size=eagle.sizes["hidden_size"],
        intermediate_size=eagle.sizes["intermediate_size"],
        rms_norm_eps=float(eagle.sizes["rms_norm_eps"]),
        tied_head=bool(target.tie_word_embeddings),
        rope=rope_frequencies(target, head_dim),
    )


def _draft_ids(checkpoint: Checkpoint, eagle: EagleConfig, vocab_size: int) -> torch.Tensor | None:
    """Ids [draft_vocab] of the target that the head guesses; None: all of them, in order.

    Raises:
        ConfigError: The maps contradict one another, or lead out of the vocabulary.
    """
    if not checkpoint.has("d2t"):
        if eagle.draft_vocab_size not in (None, vocab_size):
            raise ConfigError(f"{eagle.folder} lacks d2t, and guesses {eagle.draft_vocab_size} of {vocab_size} ids")
        return None
    size = eagle.draft_vocab_size
    offsets = checkpoint.tensor("d2t", (size,) if size else None).to(torch.int64)
    draft_ids = torch.arange(len(offsets)) + offsets
    if int(draft_ids.min()) < 0 or int(draft_ids.max()) >= vocab_size:
        raise ConfigError(f"d2t: leads to ids outside the vocabulary of {vocab_size} ({eagle.folder})")
    if checkpoint.has("t2d"):
        known = checkpoint.tensor("t2d").to(torch.bool).nonzero().flatten()
        if not torch.equal(known, draft_ids):
            raise ConfigError(f"t2d: contradicts d2t ({eagle.folder})")
    return draft_ids


class DraftHead(Head):
    """A head over part of a vocabulary; ids that it does not know get no probability.

    Args:
        known: Head over the ids it knows.
        draft_ids: int64 [draft_vocab], these ids.
        vocab_size: The target's vocabulary size.
    """

    def __init__(self, known: Head, draft_ids: torch.Tensor, vocab_size: int) -> None:
        self._known, self._draft_ids, self._vocab_size = known, draft_ids, vocab_size
        self.nbytes = known.nbytes

    @override
    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        known = self._known(rows)
        logits = torch.full((len(rows), self._vocab_size), -torch.inf, device=known.device)
        return logits.index_copy_(1, self._draft_ids, known)


def draft_identity(
    folder: Path, target: Path | None, name: str = "", dtype: str = "auto", device: str = "auto"
) -> ModelIdentity:
    """Identity that a drafter of a draft model or head announces.

    A head has its target's vocabulary, and names the states that it drafts from.

    Args:
        folder: Folder of the draft model or the head.
        target: The target's folder, which a head needs.
        name: Shown in the registry; empty: the folder's.
        dtype: As in `load_decoder`.
        device: As in `load_decoder`.

    Raises:
        ConfigError: A folder is missing, or is no checkpoint that can be served.
    """
    if not is_eagle3(folder):
        return model_identity(folder, name, dtype, device=device)
    of_target = model_identity(_target_of(folder, target), dtype=dtype)
    return replace(of_target, name=name or served_name(folder), weights_hash="", states_hash=states_hash(folder))


def load_draft(
    folder: Path, target: Path | None, dtype: str = "auto", device: str = "auto", num_threads: int | None = None
) -> Decoder:
    """Loads a draft model or head; see `draft_identity` and `load_decoder`.

    Raises:
        ConfigError: As both.
    """
    if not is_eagle3(folder):
        return load_decoder(folder, dtype, device, num_threads)
    return load_eagle3(folder, _target_of(folder, target), dtype, device, num_threads)


def _target_of(folder: Path, target: Path | None) -> Path:
    if target is None:
        raise ConfigError(f"--target-model: the EAGLE-3 head {folder} needs the folder of its target")
    return target
