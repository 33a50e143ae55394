"""Which engine serves which family of models, as docs/models.md: from the table that our engine refuses by."""

from __future__ import annotations

from paceline.checkpoints.families import FAMILIES, GENERIC, LEAN, Family
from tests.support.references.tables import WRITTEN_BY, code, table

HEAD = f"""# Models

Which engine serves which family of models. {WRITTEN_BY}
Our engine refuses models by the same table. `paceline models check NAME` shows the answer for one
model. [How to name a model of your own](bring-your-own-model.md).

Our engine computes what transformers computes, on a CPU or one GPU. It has two decoders:

* **fast**: made for the family, its layers fused and its weights packed.
* **generic**: transformers' own modules around our paged attention. At start it runs a short text through both
  attentions, and refuses the model if their logits differ. Causal models that are not in the table are tried so, too.

vLLM runs behind the same gateway with `--engine vllm`, with the same drafters. Use it for large models on GPUs.

## CPUs

The fast decoder multiplies by loops of its own. Weights are bfloat16 or float32, as the checkpoint has them.

| CPU | instructions | such as |
| --- | --- | --- |
| x86-64 with AVX2 and FMA | fused multiply-adds, 16 registers of 8 | Intel since Haswell; AMD Zen 1 to 3 |
| x86-64 with AVX-512 | fused multiply-adds, 32 registers of 16 | Intel servers since Skylake |
| x86-64 with AVX-512 and BF16, AMD | the instruction for pairs of bfloat16 | AMD since Zen 4 |
| ARM | fused multiply-adds, 32 registers of 4 | the code was generated and read, and has not run |
| x86-64 without FMA | products and sums, each rounded | texts may differ; the start says so |

**The same seed gives the same tokens on all CPUs with fused multiply-add.** Every sum has one order and one rounding,
whatever instructions compute it. A test compiles for each set of instructions that a machine has, and compares logits
and 200 texts. [Speed by CPU](benchmarks.md).

## Families

vLLM serves all of these.

"""
BESIDE = "\n## Limits within a family\n\n"
# An entry of config.json, what our engine does then, and what a user can do.
RULES = (
    (
        "`quantization_config` (AWQ, GPTQ, FP8, compressed-tensors, bitsandbytes, MXFP4)",
        "refuses it",
        "name the checkpoint with bf16 weights, or use `--engine vllm`",
    ),
    (
        "`auto_map`, of an architecture that transformers does not know",
        "refuses it: code of a checkpoint is never run",
        "name another model, or use `--engine vllm --vllm-arg=--trust-remote-code`",
    ),
    (
        "`rope_scaling` of the kinds `dynamic` and `longrope`",
        "refuses it: a row would depend on the other rows of its batch",
        "use `--engine vllm`",
    ),
    (
        "`rope_scaling` of the kind `linear`",
        "serves `factor` times `max_position_embeddings`",
        "nothing",
    ),
    (
        "`rope_scaling` of the kind `yarn`",
        "serves `max_position_embeddings`",
        "ask for up to `factor` times the original length with `--max-model-len`; short texts may lose by it",
    ),
    (
        "`tie_word_embeddings`, and another `lm_head.weight` in the file",
        "uses the file's, with a warning, as transformers and vLLM do",
        "correct config.json",
    ),
    (
        "a field that is null, of another type or out of range",
        "refuses it in one line, in transformers' words or its own",
        "correct the file, or copy the original's",
    ),
    (
        "`sliding_window`",
        "serves texts up to the window, where it changes nothing",
        "use `--engine vllm` for longer ones",
    ),
    ("`vision_config`", "refuses it", "use `--engine vllm`, which serves the text alone"),
)
TAIL = """
Tokens that end a text are those of `generation_config.json`, or else of `config.json`, and the `eos_token` of
`tokenizer_config.json`. Ids outside the vocabulary are ignored with a warning. `models check` shows this beforehand.

Weights are read from `*.safetensors`. Pickle files (`.bin`, `.pt`), which can run code when read, and GGUF files are
refused, with a sentence that says what to do.
"""
DECODERS = {LEAN: "fast", GENERIC: "generic"}


def page() -> str:
    """The whole page."""
    families = table(
        ("family", "architectures", "our engine", "such as"),
        (
            (family.name, ", ".join(map(code, family.architectures)), _ours(family), family.example)
            for family in FAMILIES
        ),
    )
    return HEAD + families + BESIDE + table(("in `config.json`", "our engine", "what to do"), RULES) + TAIL


def _ours(family: Family) -> str:
    return DECODERS[family.decoder] if family.decoder else f"no: {family.why}"
