"""Writes a GGUF file of a small Llama checkpoint: `to_gguf.py CHECKPOINT OUT`, in an environment with `gguf`.

Matrices stay the bf16 they are, bit by bit; vectors become f32, as llama.cpp wants them. It takes what our pair is: the
Llama architecture without rope scaling, one safetensors file in bf16, a byte-level BPE tokenizer.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def main() -> None:
    """Converts the checkpoint folder named first into the file named second."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"{source}: {config['model_type']} is not converted, only llama")
    writer = gguf.GGUFWriter(out, "llama")
    _write_settings(writer, source.name, config)
    _write_vocabulary(writer, json.loads((source / "tokenizer.json").read_text(encoding="utf-8")), config)
    for name, bits in read_bf16(source / "model.safetensors").items():
        _write_tensor(writer, name, bits, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_bf16(file: Path) -> dict[str, np.ndarray[Any, np.dtype[np.uint16]]]:
    """Returns the bits of each tensor of a safetensors file, which numpy has no bf16 for."""
    raw = file.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{file}: {name} is {entry['dtype']}, only BF16 is converted")
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[start:end], dtype=np.uint16).reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    """Returns llama.cpp's name of a tensor; raises `KeyError` for one it does not know."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        return f"{OUTER[name]}.weight"
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.weight"


def interleave_rope(bits: np.ndarray[Any, np.dtype[np.uint16]], heads: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Reorders the rows of q or k [heads * head_dim, hidden]: llama.cpp rotates neighbours, transformers halves."""
    rows, columns = bits.shape
    halves = bits.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _write_settings(writer: Any, name: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"rope type {rope['rope_type']} is not converted")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    words = {ids: word for word, ids in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    count = config["vocab_size"]
    words = {ids: f"<unused{ids}>" for ids in range(count)} | words | special
    kinds = [gguf.TokenType.CONTROL if ids in special else gguf.TokenType.NORMAL for ids in range(count)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words[ids] for ids in range(count)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _write_tensor(writer: Any, name: str, bits: np.ndarray[Any, np.dtype[np.uint16]], config: dict[str, Any]) -> None:
    if bits.ndim == 1:
        writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        return
    if name.endswith("q_proj.weight"):
        bits = interleave_rope(bits, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        bits = interleave_rope(bits, config["num_key_value_heads"])
    as_bytes = np.ascontiguousarray(bits).view(np.uint8)
    writer.add_tensor(gguf_name(name), as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main()
