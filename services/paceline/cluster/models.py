"""`paceline models`: the checkpoints that are here; which engine serves a model; fetching one of the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoints.families import (
    GENERIC,
    LEAN,
    Config,
    architectures,
    describes_eagle3,
    eagle3_refusal,
    family_of,
    quant_method,
    refusal,
    text_config,
    vllm_refusal,
)
from paceline.checkpoints.identity import IGNORED, end_tokens
from paceline.checkpoints.json_file import read_object
from paceline.checkpoints.sizes import Sizes, sizes_of
from paceline.checkpoints.source import CONFIG_FILES, MODEL_FILES, TEXT_FILES, folder_of, parse
from paceline.cluster.checkpoints import CheckpointFacts, bundled_and_cached, facts_of
from paceline.cluster.foreground import say, table
from paceline.core.errors import ConfigError
from paceline.service.config import parse as parse_settings
from paceline.service.config import setting

PROG = "paceline models"
DESCRIPTION = (
    "Lists checkpoints: those in the package, the widened demo target, and folders that are named. "
    "paceline models check NAME shows which engine serves a model, with how much memory; paceline models fetch "
    "NAME fetches one from the Hub."
)
CHECK_DESCRIPTION = (
    "Says which engine serves a model, what it takes of memory and what limits it; reads its JSON settings alone."
)
FETCH_DESCRIPTION = (
    "Fetches a checkpoint of the Hugging Face Hub into its cache (HF_HOME), with the token HF_TOKEN, and prints the "
    "folder. What is there already is not fetched again."
)
GB = 1e9
KIB = 1024
DECODERS = {
    LEAN: "serves it, by the decoder made for it",
    GENERIC: "serves it, by transformers' modules (slower), if a trial at start gives transformers' own logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    path: tuple[Path, ...] = setting((), help="Another checkpoint folder to list.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    name: str = setting(help="ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub, or a checkpoint folder.")
    context: int | None = setting(None, help="Length of a session to count.", unit="tokens", low=1, high=100_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    name: str = setting(help="ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub.")
    tokenizer_only: bool = setting(False, help="Fetch what a gateway reads: tokenizer, templates and settings.")


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline models`, which lists, and of `check` and `fetch`.

    Raises:
        ConfigError: A checkpoint cannot be fetched, or a folder is none; says what to do.
    """
    actions = {"check": check, "fetch": fetch}
    if argv and argv[0] in actions:
        actions[argv[0]](argv[1:])
        return
    config = parse_settings(ModelsConfig, argv, os.environ, PROG, DESCRIPTION)
    rows: list[tuple[str, ...]] = [
        ("name", "architecture", "parameters", "vocabulary", "context", "vocabulary hash", "folder")
    ]
    broken: list[str] = []
    for path in (*bundled_and_cached(os.environ), *config.path):
        try:
            rows.append(_row(facts_of(path)))
        except ConfigError as error:
            broken.append(str(error))
    say("\n".join(table(rows)))
    if broken:
        raise ConfigError("; ".join(broken))


def _row(facts: CheckpointFacts) -> tuple[str, ...]:
    size = f"{facts.num_parameters / 1e6:,.1f} M"
    if facts.widened_from is not None:
        size += f", widened from {facts.widened_from}"
    return (
        facts.path.name,
        facts.architecture,
        size,
        f"{facts.vocab_size:,}",
        f"{facts.context_len:,}",
        facts.vocab_hash[:16],
        str(facts.path),
    )


def fetch(argv: Sequence[str]) -> None:
    settings = parse_settings(FetchConfig, argv, os.environ, f"{PROG} fetch", FETCH_DESCRIPTION, first="name")
    files = TEXT_FILES if settings.tokenizer_only else MODEL_FILES
    say(str(folder_of(settings.name, "NAME", files=files, say=say)))


def check(argv: Sequence[str]) -> None:
    """Prints what serves a model; ends with status 1 if neither engine does."""
    settings = parse_settings(CheckConfig, argv, os.environ, f"{PROG} check", CHECK_DESCRIPTION, first="name")
    folder = folder_of(settings.name, "NAME", files=CONFIG_FILES)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{settings.name} holds no config.json: name a checkpoint in Hugging Face layout")
    config = read_object(path)
    say("\n".join([*answer(str(parse(settings.name)), config, settings.context), *remarks(folder, config)]))
    refused = eagle3_refusal(config) if describes_eagle3(config) else refusal(config) and vllm_refusal(config)
    if refused:
        raise SystemExit(1)


def remarks(folder: Path, config: Config) -> Iterator[str]:
    """Lines on what our engine warns of, or refuses, in the other files of a checkpoint folder."""
    vocab_size = text_config(config).get("vocab_size")
    try:
        ends = end_tokens(folder, config.get("eos_token_id"), vocab_size if isinstance(vocab_size, int) else 2**31)
    except ConfigError as error:
        yield f"our engine  no: {error}"
        return
    if ends.ignored:
        yield f"warning     {IGNORED.format(list(ends.ignored), vocab_size, folder)}"


def answer(name: str, config: Config, context: int | None = None) -> Iterator[str]:
    """Lines on one model.

    Args:
        name: What the user has named.
        context: Length of a session whose KV is counted, beside that of the longest.
    """
    if describes_eagle3(config):
        refused = eagle3_refusal(config)
        yield f"{name}  an EAGLE-3 head"
        yield f"our engine  {'no: ' + refused if refused else 'drafts with it, beside its target'}"
        return
    family, sizes = family_of(config), sizes_of(config)
    yield f"{name}  {', '.join(architectures(config) or ('no architecture',))}{_size(sizes)}"
    why, vllm_why = refusal(config), vllm_refusal(config)
    trial = DECODERS[family.decoder] if family is not None and family.decoder else DECODERS[GENERIC]
    yield f"our engine  {'no: ' + why if why else trial}"
    yield f"vLLM        {'no: ' + vllm_why if vllm_why else _vllm(config, known=family is not None)}"
    if sizes is not None and not (why and vllm_why):
        yield from _memory(config, sizes, context)
        yield f"limits      {_limits(sizes, ours=not why)}"


def _size(sizes: Sizes | None) -> str:
    if sizes is None:
        return ""
    count = "" if sizes.num_parameters is None else f", {_billions(sizes.num_parameters)} parameters"
    return f", {sizes.num_layers} layers{count}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 0.9995e9 else f"{count / 1e6:.3g} M"


def _vllm(config: Config, *, known: bool) -> str:
    images = ", its text alone" if "vision_config" in config else ""
    return f"serves it with --engine vllm{images}" if known else "is not known to serve it; try --engine vllm"


def _memory(config: Config, sizes: Sizes, context: int | None) -> Iterator[str]:
    if sizes.weight_bytes is None:
        yield "weights     config.json does not tell: the sizes of the *.safetensors do"
    else:
        kind = quant_method(config) or "as stored"
        yield f"weights     {sizes.weight_bytes / GB:.3g} GB ({kind})"
    if not sizes.full_layers and not sizes.window_layers:
        yield "KV          none: a state of fixed size for each session"
        return
    lengths = [length for length in (1000, context, sizes.context_len) if length]
    counted = ", ".join(f"{sizes.kv_bytes(length) / GB:.3g} GB for {length:,}" for length in dict.fromkeys(lengths))
    yield f"KV          {sizes.kv_bytes(1) / KIB:.4g} KiB a token, {counted} tokens (16 bits)"


def _limits(sizes: Sizes, *, ours: bool) -> str:
    context = (
        "a context that config.json does not tell" if sizes.context_len is None else f"{sizes.context_len:,} tokens"
    )
    if sizes.context_len and sizes.longest_context_len and sizes.longest_context_len > sizes.context_len:
        context += f", {sizes.longest_context_len:,} where --max-model-len asks for them (YaRN)"
    if not sizes.window_layers:
        return context
    if ours:
        return f"{context}; {sizes.window:,} in our engine, which serves no further than the sliding window"
    return f"{context}; {sizes.window_layers} layers look back {sizes.window:,} tokens"
