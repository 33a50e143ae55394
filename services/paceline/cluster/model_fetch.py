"""`paceline models fetch`: fetches a checkpoint into the Hub's cache, before a service starts offline from there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoints.source import MODEL_FILES, TEXT_FILES, folder_of
from paceline.cluster.drain import say
from paceline.service.config import parse, setting

PROG = "paceline models fetch"
DESCRIPTION = (
    "Fetches a checkpoint of the Hugging Face Hub into its cache (HF_HOME), with the token HF_TOKEN, and prints the "
    "folder. What is there already is not fetched again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Settings of `paceline models fetch`."""

    name: str = setting(help="ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub.")
    tokenizer_only: bool = setting(False, help="Fetch what a gateway reads: tokenizer, templates and settings.")


def main(argv: Sequence[str]) -> None:
    """Fetches, and prints the folder.

    Raises:
        ConfigError: It cannot be had; says what to do.
    """
    settings = parse(FetchConfig, argv, os.environ, PROG, DESCRIPTION, first="name")
    files = TEXT_FILES if settings.tokenizer_only else MODEL_FILES
    say(str(folder_of(settings.name, "NAME", files=files, say=say)))
