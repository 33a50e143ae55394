"""Families of models: which engine serves which, and what stands in the way. Needs nothing but the standard library.

This table serves our engine's refusals, `paceline models check` and `docs/models.md`. A quantisation and code of a
checkpoint's own are judged here as well; the types of other fields are transformers' affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.json_files import CONFIG, number, read_object, shown, whole
from paceline.core.errors import ConfigError

Config = Mapping[str, Any]

# Decoders of our engine.
LEAN, GENERIC = "lean", "generic"
# Positions turned by frequencies that depend on the longest sequence of a batch.
LENGTH_DEPENDENT: Final = frozenset({"dynamic", "longrope"})
SERVED_SCALINGS: Final = frozenset({"default", "linear", "llama3", "yarn"})

EAGLE3_ARCHITECTURE: Final = "LlamaForCausalLMEagle3"

# Whole numbers of a head's layer, and those that must be there.
EAGLE3_NEEDS: Final = ("hidden_size", "intermediate_size", "num_attention_heads")
EAGLE3_SIZES: Final = (*EAGLE3_NEEDS, "num_key_value_heads", "head_dim", "vocab_size")
# Epsilon of norms, from and to.
NORM_EPS: Final = (1e-12, 0.1)

_SPECULATORS: Final = "speculators_model_type"
# Options of some heads that change what is computed.
_UNSERVED_IN_EAGLE3: Final = ("norm_before_fc", "norm_before_residual", "norm_output", "fc_norm")

_SOFTCAP = "its attention caps scores (attn_logit_softcapping)"
_SINKS = "its attention has sinks"
_MLA = "its attention is latent (MLA), and its KV has a shape of its own"
_STATE = "its layers keep a state that is not paged KV"
_IMAGES = "it reads more than text, and its decoder lies inside a larger model"
_OWN_LOOP = "its layers do not go through transformers' attention interface"
_ALIBI = "its positions are biases of the scores (ALiBi)"
_NO_DECODER = "it is no causal language model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        architectures: As config.json names them.
        example: A repository of the Hub.
        decoder: Name of our engine's decoder; empty: our engine does not serve it.
        why: Why it does not.
    """

    name: str
    architectures: tuple[str, ...]
    example: str
    decoder: str = ""
    why: str = ""


def _lean(name: str, architecture: str, example: str, **more: Any) -> Family:
    return Family(name=name, architectures=(architecture,), example=example, decoder=LEAN, **more)


def _generic(name: str, architecture: str, example: str, **more: Any) -> Family:
    return Family(name=name, architectures=(architecture,), example=example, decoder=GENERIC, **more)


def _vllm_only(name: str, architectures: str, example: str, why: str, **more: Any) -> Family:
    return Family(name=name, architectures=tuple(architectures.split()), example=example, why=why, **more)


FAMILIES: Final = (
    _lean("Llama 2, 3", "LlamaForCausalLM", "meta-llama/Llama-3.1-8B-Instruct"),
    _lean("Mistral", "MistralForCausalLM", "mistralai/Mistral-7B-Instruct-v0.3"),
    _lean("Qwen2, 2.5", "Qwen2ForCausalLM", "Qwen/Qwen2.5-7B-Instruct"),
    _lean("Qwen3", "Qwen3ForCausalLM", "Qwen/Qwen3-8B"),
    _generic("Arcee", "ArceeForCausalLM", "arcee-ai/AFM-4.5B"),
    _generic("Cohere", "CohereForCausalLM", "CohereForAI/c4ai-command-r-v01"),
    _generic("Cohere 2", "Cohere2ForCausalLM", "CohereForAI/c4ai-command-r7b-12-2024"),
    _generic("ERNIE 4.5", "Ernie4_5ForCausalLM", "baidu/ERNIE-4.5-0.3B-PT"),
    _generic("EXAONE 4", "Exaone4ForCausalLM", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    _generic("Gemma", "GemmaForCausalLM", "google/gemma-7b"),
    _generic("Gemma 3, text", "Gemma3ForCausalLM", "google/gemma-3-1b-it"),
    _generic("GLM 4", "GlmForCausalLM", "zai-org/glm-4-9b-hf"),
    _generic("GLM 4, 0414", "Glm4ForCausalLM", "zai-org/GLM-4-9B-0414"),
    _generic("GPT-2", "GPT2LMHeadModel", "openai-community/gpt2"),
    _generic("GPT-BigCode", "GPTBigCodeForCausalLM", "bigcode/starcoder"),
    _generic("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", "EleutherAI/pythia-6.9b"),
    _generic("Granite", "GraniteForCausalLM", "ibm-granite/granite-3.3-8b-instruct"),
    _generic("Hunyuan", "HunYuanDenseV1ForCausalLM", "tencent/Hunyuan-7B-Instruct"),
    _generic("Nemotron", "NemotronForCausalLM", "nvidia/Minitron-8B-Base"),
    _generic("OLMo", "OlmoForCausalLM", "allenai/OLMo-7B-hf"),
    _generic("OLMo 2", "Olmo2ForCausalLM", "allenai/OLMo-2-1124-7B"),
    _generic("OLMo 3", "Olmo3ForCausalLM", "allenai/Olmo-3-7B-Instruct"),
    _generic("OPT", "OPTForCausalLM", "facebook/opt-1.3b"),
    _generic("Phi 1, 2", "PhiForCausalLM", "microsoft/phi-2"),
    _generic("Phi 3, 4", "Phi3ForCausalLM", "microsoft/Phi-3-mini-4k-instruct"),
    _generic("Seed-OSS", "SeedOssForCausalLM", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    _generic("SmolLM3", "SmolLM3ForCausalLM", "HuggingFaceTB/SmolLM3-3B"),
    _generic("StableLM", "StableLmForCausalLM", "stabilityai/stablelm-2-1_6b"),
    _generic("StarCoder 2", "Starcoder2ForCausalLM", "bigcode/starcoder2-7b"),
    _generic("Mixtral", "MixtralForCausalLM", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    _generic("Qwen2 MoE", "Qwen2MoeForCausalLM", "Qwen/Qwen1.5-MoE-A2.7B"),
    _generic("Qwen3 MoE", "Qwen3MoeForCausalLM", "Qwen/Qwen3-30B-A3B"),
    _generic("OLMoE", "OlmoeForCausalLM", "allenai/OLMoE-1B-7B-0924"),
    _generic("GLM 4.5", "Glm4MoeForCausalLM", "zai-org/GLM-4.5-Air"),
    _vllm_only("Gemma 2", "Gemma2ForCausalLM", "google/gemma-2-9b-it", _SOFTCAP),
    _vllm_only("gpt-oss", "GptOssForCausalLM", "openai/gpt-oss-20b", _SINKS),
    _vllm_only("GPT-J", "GPTJForCausalLM", "EleutherAI/gpt-j-6b", _OWN_LOOP),
    _vllm_only("Falcon", "FalconForCausalLM", "tiiuae/falcon-7b", _OWN_LOOP),
    _vllm_only("BLOOM", "BloomForCausalLM", "bigscience/bloom-7b1", _ALIBI),
    _vllm_only("MPT", "MPTForCausalLM MptForCausalLM", "mosaicml/mpt-7b", _ALIBI),
    _vllm_only("DeepSeek V2", "DeepseekV2ForCausalLM", "deepseek-ai/DeepSeek-V2-Lite", _MLA),
    _vllm_only("DeepSeek V3, R1, Kimi K2", "DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-V3", _MLA),
    _vllm_only("Mamba", "MambaForCausalLM Mamba2ForCausalLM", "state-spaces/mamba-2.8b-hf", _STATE),
    _vllm_only("Jamba", "JambaForCausalLM", "ai21labs/Jamba-v0.1", _STATE),
    _vllm_only("Qwen3-Next", "Qwen3NextForCausalLM", "Qwen/Qwen3-Next-80B-A3B-Instruct", _STATE),
    _vllm_only("Falcon H1, Bamba", "FalconH1ForCausalLM BambaForCausalLM", "tiiuae/Falcon-H1-7B-Instruct", _STATE),
    _vllm_only("Granite 4", "GraniteMoeHybridForCausalLM", "ibm-granite/granite-4.0-h-tiny", _STATE),
    _vllm_only("LFM2", "Lfm2ForCausalLM Lfm2MoeForCausalLM", "LiquidAI/LFM2-1.2B", _STATE),
    _vllm_only("Nemotron-H", "NemotronHForCausalLM", "nvidia/Nemotron-H-8B-Base-8K", _STATE),
    _vllm_only("Gemma 3", "Gemma3ForConditionalGeneration", "google/gemma-3-12b-it", _IMAGES),
    _vllm_only("Llama 4", "Llama4ForConditionalGeneration", "meta-llama/Llama-4-Scout-17B-16E-Instruct", _IMAGES),
    _vllm_only("Mistral 3", "Mistral3ForConditionalGeneration", "mistralai/Mistral-Small-3.1-24B-Base-2503", _IMAGES),
    _vllm_only(
        "Qwen VL",
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        _IMAGES,
    ),
)  # fmt: skip
_BY_ARCHITECTURE: Final = {name: family for family in FAMILIES for name in family.architectures}
LEAN_ARCHITECTURES: Final = frozenset(
    name for family in FAMILIES if family.decoder == LEAN for name in family.architectures
)


def family_of(config: Config) -> Family | None:
    """The family of a config.json; None: it is not in the table."""
    return next((_BY_ARCHITECTURE[name] for name in architectures(config) if name in _BY_ARCHITECTURE), None)


def refusal(config: Config) -> str:
    """Why our engine does not serve a model, by its config.json, and what to use instead; empty: it serves or tries."""
    family, own_code = family_of(config), config.get("auto_map")
    if family is None and not is_causal(config):
        return f"architectures: must name one causal language model, got {_named(config)}"
    if family is not None and family.why:
        return f"architectures: {_named(config)} is not served by our engine, since {family.why}: use --engine vllm"
    quantised = quant_method(config)
    if quantised:
        return (
            f"quantization_config: quantised checkpoints ({quantised}) are not served by our engine: name the one with "
            "bf16 weights, or serve this one with --engine vllm"
        )
    if family is None and own_code:
        return (
            f"auto_map: the model brings Python code of its own ({_named(config)}), which is never run here: name a "
            "model of a family in docs/models.md, or serve it with --engine vllm --vllm-arg=--trust-remote-code"
        )
    scaled = rope_types(config) & LENGTH_DEPENDENT
    if scaled:
        return (
            f"rope_scaling: {sorted(scaled)[0]!r} is not served by our engine, since it depends on the longest "
            "sequence of a batch: use --engine vllm"
        )
    unknown = rope_types(config) - SERVED_SCALINGS
    if unknown and family is not None and family.decoder == LEAN:
        served = sorted(SERVED_SCALINGS)
        return f"{CONFIG}: rope_parameters.rope_type: {sorted(unknown)[0]!r} is not served, one of {served} is"
    return ""


def eagle3_refusal(config: Config, where: object = CONFIG) -> str:
    """Why our engine does not draft with an EAGLE-3 head, by its config.json; empty: it does."""
    if _SPECULATORS in config:
        return f"{where}: {_SPECULATORS}: heads of speculators are not served; SpecForge's and SafeAILab's are"
    unserved = [name for name in _UNSERVED_IN_EAGLE3 if config.get(name)]
    if unserved:
        return f"{where}: {unserved[0]}: EAGLE-3 heads with this option are not served"
    try:
        _check_eagle3(config, where)
    except ConfigError as error:
        return str(error)
    return ""


def _check_eagle3(config: Config, where: object) -> None:
    options = config.get("eagle_config") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: eagle_config must be an object, got {shown(options)}")
    for name in EAGLE3_SIZES:
        if name in EAGLE3_NEEDS or config.get(name) is not None:
            whole(config.get(name), f"{where}: {name}")
    number(config.get("rms_norm_eps"), f"{where}: rms_norm_eps", *NORM_EPS)
    if config.get("draft_vocab_size") is not None:
        whole(config["draft_vocab_size"], f"{where}: draft_vocab_size")
    ids = options.get("eagle_aux_hidden_state_layer_ids")
    if not (ids is None or (isinstance(ids, list) and all(type(each) is int for each in ids))):
        place = f"{where}: eagle_config: eagle_aux_hidden_state_layer_ids"
        raise ConfigError(f"{place} must be a list of layers, got {shown(ids)}")


def vllm_refusal(config: Config) -> str:
    """Why vLLM does not serve a model behind a gateway; empty: it does, or tries."""
    return "" if family_of(config) or is_causal(config) else f"{_NO_DECODER} ({_named(config)})"


def is_causal(config: Config) -> bool:
    """Whether config.json names one causal language model, as our engine reads it."""
    names = architectures(config)
    return len(names) == 1 and names[0].endswith(("ForCausalLM", "LMHeadModel"))


def architectures(config: Config) -> tuple[str, ...]:
    """Names of the classes that config.json gives."""
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def quant_method(config: Config) -> str:
    """How the weights are quantised; empty: they are not."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    return str(found.get("quant_method", "unknown")) if isinstance(found, Mapping) else ""


def rope_types(config: Config) -> frozenset[str]:
    """Names of the scalings of rotary positions, in old and new spellings."""
    text = text_config(config)
    found = [part for name in ("rope_scaling", "rope_parameters") if isinstance(part := text.get(name), Mapping)]
    parts = [*found, *(each for part in found for each in part.values() if isinstance(each, Mapping))]
    return frozenset(str(part.get("rope_type") or part.get("type") or "default") for part in parts)


def context_lens(limit: int, model_type: str, scaling: Config) -> tuple[int, int]:
    """How far a model reads in tokens, as its author set it and at most.

    Linear scaling stretches the positions that config.json names. YaRN may stretch them in the file or leave that to
    whoever serves the model, since it costs quality in short texts; it is used when asked for.

    Args:
        model_type: As in config.json; Gemma 3's limit is that after scaling.
        scaling: rope_scaling or rope_parameters.
    """
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor") or 1
    if kind == "linear" and not model_type.startswith("gemma3"):
        return int(limit * factor), int(limit * factor)
    if kind == "yarn":
        return limit, max(limit, int((scaling.get("original_max_position_embeddings") or limit) * factor))
    return limit, limit


def text_config(config: Config) -> Config:
    """The part of config.json that describes the decoder of text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def is_eagle3(folder: Path) -> bool:
    """Whether a checkpoint folder holds an EAGLE-3 head."""
    return (folder / "config.json").is_file() and describes_eagle3(read_object(folder / "config.json"))


def describes_eagle3(config: Config) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    return EAGLE3_ARCHITECTURE in architectures(config) or config.get(_SPECULATORS) == "eagle3"


def _named(config: Config) -> str:
    return ", ".join(architectures(config)) or "none is named"
