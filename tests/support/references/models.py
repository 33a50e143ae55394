"""Writes docs/models.md from the table by which our engine refuses models."""

from __future__ import annotations

from paceline.checkpoints.families import FAMILIES, GENERIC, LEAN, Family
from tests.support.references.tables import WRITTEN_BY, code, table

HEAD = f"""# Models

This page lists the engines of each model family. {WRITTEN_BY}
Our engine refuses models by the same table. `paceline models check NAME` shows the engines of one model.
[Bring your own model](bring-your-own-model.md) explains names and downloads.

Our engine runs on a CPU or one GPU and computes the same function as transformers. It has two decoders:

* **fast**: written for the family, with fused layers and packed weights.
* **generic**: transformers' own modules with our paged attention. At start it runs a short text through both
  attentions, and refuses the model if their logits differ. Causal models outside the table are tried with this
  decoder, too.

vLLM runs behind the same gateway with `--engine vllm`, with the same drafters. Use it for large models on GPUs.

## CPUs

The fast decoder multiplies with our own compiled loops. Weights keep the checkpoint's type, bfloat16 or float32.

| CPU | instructions | examples |
| --- | --- | --- |
| x86-64 with AVX2 and FMA | fused multiply-adds, 16 registers of 8 | Intel since Haswell; AMD Zen 1 to 3 |
| x86-64 with AVX-512 | fused multiply-adds, 32 registers of 16 | Intel servers since Skylake |
| x86-64 with AVX-512 and BF16, AMD | the instruction for pairs of bfloat16 | AMD since Zen 4 |
| ARM | fused multiply-adds, 32 registers of 4 | not run; only the generated code was checked |
| x86-64 without FMA | products and sums, each rounded | texts may differ; the service warns at start |

**The same seed gives the same tokens on all CPUs with fused multiply-add.** Every sum has one order and one rounding,
whatever the instructions. A test compiles for each instruction set of the machine, and compares logits and 200
texts. [Speed by CPU](benchmarks.md).

## Families

vLLM serves all these families.

"""
BESIDE = "\n## Limits within a family\n\n"
# An entry of config.json, our engine's reaction, and advice.
RULES = (
    (
        "`quantization_config` (AWQ, GPTQ, FP8, compressed-tensors, bitsandbytes, MXFP4)",
        "refuses it",
        "name the checkpoint with bf16 weights, or use `--engine vllm`",
    ),
    (
        "`auto_map`, with an architecture that transformers does not know",
        "refuses it: a checkpoint's code never runs",
        "name another model, or use `--engine vllm --vllm-arg=--trust-remote-code`",
    ),
    (
        "`rope_scaling` of type `dynamic` or `longrope`",
        "refuses it: a row would depend on the other rows of its batch",
        "use `--engine vllm`",
    ),
    (
        "`rope_scaling` of type `linear`",
        "serves `factor` times `max_position_embeddings`",
        "nothing",
    ),
    (
        "`rope_scaling` of type `yarn`",
        "serves `max_position_embeddings`",
        "set up to `factor` times the original length with `--max-model-len`; short texts may get worse",
    ),
    (
        "`tie_word_embeddings`, and a different `lm_head.weight` in the file",
        "uses the file's, with a warning, as transformers and vLLM do",
        "correct config.json",
    ),
    (
        "a field that is null, of a wrong type or out of range",
        "refuses it with a one-line error, from transformers or our own",
        "correct the file, or copy the original file",
    ),
    (
        "`sliding_window`",
        "serves texts up to the window, where the window changes nothing",
        "use `--engine vllm` for longer texts",
    ),
    ("`vision_config`", "refuses it", "use `--engine vllm`, which serves the text alone"),
)
TAIL = """
End-of-text tokens come from `generation_config.json`, or else from `config.json`, and from the `eos_token` of
`tokenizer_config.json`. Ids outside the vocabulary only cause a warning, which `models check` shows beforehand.

Our engine reads weights from `*.safetensors`. [GGUF files](bring-your-own-model.md#gguf-files) of Llama, Mistral, Qwen2
and Qwen3 are converted first. Pickle files (`.bin`, `.pt`) are refused, since they can run code when read.
"""
DECODERS = {LEAN: "fast", GENERIC: "generic"}


def page() -> str:
    """The whole page."""
    families = table(
        ("family", "architectures", "our engine", "example"),
        (
            (family.name, ", ".join(map(code, family.architectures)), _ours(family), family.example)
            for family in FAMILIES
        ),
    )
    return HEAD + families + BESIDE + table(("in `config.json`", "our engine", "advice"), RULES) + TAIL


def _ours(family: Family) -> str:
    return DECODERS[family.decoder] if family.decoder else f"no: {family.why}"
