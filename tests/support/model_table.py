"""The families of models as a page: `python -m tests.support.model_table` writes `docs/models.md` from the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.model_families import FAMILIES, GENERIC, LEAN, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEAD = """# Models

Which engine serves which family of models. `python -m tests.support.model_table` writes this page from the table that
the engine's own refusals come from; a test holds it against that. `paceline models check NAME` tells the same of one
model, with the memory that it takes. [How to name a model of your own](bring-your-own-model.md).

Our engine computes exactly what transformers computes, on a CPU or one GPU. It has two decoders:

* **fast**: made for the family, its layers fused and its weights packed.
* **generic**: transformers' own modules around our paged attention. At start it runs a short text through both
  attentions, and refuses the model if their logits differ. A causal model that is not in the table is tried likewise.

vLLM runs behind the same gateway with `--engine vllm`, and drafts with the same drafters.

| family | architectures | our engine | vLLM | such as |
| --- | --- | --- | --- | --- |
"""
BESIDE = """
## What the family does not tell

| in `config.json` | our engine | what to do |
| --- | --- | --- |
"""
# What config.json may say, what our engine does then, and what a user can do.
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
        "`sliding_window`",
        "serves texts up to the window, where it changes nothing",
        "use `--engine vllm` for longer ones",
    ),
    ("`vision_config`", "refuses it", "use `--engine vllm`, which serves the text alone"),
)
TAIL = """
Weights are read from `*.safetensors`. Files of pickles (`.bin`, `.pt`) can run code when they are read, and GGUF is
another format: both are refused, with a sentence that says what to do.
"""
DECODERS = {LEAN: "fast", GENERIC: "generic"}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_rows()) + BESIDE + "".join(f"| {' | '.join(rule)} |\n" for rule in RULES) + TAIL


def _rows() -> Iterator[str]:
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        vllm = "yes" if family.vllm else "no"
        yield f"| {family.name} | {names} | {_ours(family)} | {vllm} | {family.example} |\n"


def _ours(family: Family) -> str:
    return DECODERS[family.decoder] if family.decoder else f"no: {family.why}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
