"""Prompts of a wanted length: source code that the demo pair never saw, or the questions of a published set."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from paceline.checkpoints.corpus import load_corpus
from paceline.core.errors import ConfigError


class Prompts(Protocol):
    """Where prompts come from."""

    @property
    def described(self) -> str:
        """What they are, for the report."""
        ...

    def prompt(self, index: int, num_tokens: int) -> str:
        """Returns the prompt of a request; `num_tokens` is the length that its trace names."""
        ...


def open_prompts(path: Path | None, checkpoint: Path, *, max_tokens: int, seed: int) -> Prompts:
    """Returns the prompts of a file, or source code without one.

    Args:
        path: A question file.
        checkpoint: Folder whose tokenizer counts tokens.
        max_tokens: Questions are clipped to this.
        seed: Another seed, other pieces of code.

    Raises:
        ConfigError: The file is no question file.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    if path is None:
        return SourceCode(tokenizer, seed)
    return Questions(tuple(_clipped(tokenizer, text, max_tokens) for text in read_questions(path)), path.name)


class SourceCode:
    """Pieces of the standard library's held-out files that begin with a line; every request has one of its own."""

    described = "Python source that the demo pair never saw, cut to the trace's lengths"

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        text = "\n".join(file.text for file in load_corpus().held_out if not file.is_test)
        self._tokenizer = tokenizer
        encoded = tokenizer.encode(text, add_special_tokens=False)
        self._ids: Sequence[int] = encoded.ids
        self._starts = [at for at, (start, _) in enumerate(encoded.offsets) if start and text[start - 1] == "\n"]
        self._seed = seed

    def prompt(self, index: int, num_tokens: int) -> str:
        """See `Prompts`; cut again, the text may be a token longer or shorter."""
        chance = random.Random(f"{self._seed}/{index}")
        start = min(chance.choice(self._starts), max(0, len(self._ids) - num_tokens))
        # Never empty: what a gateway would refuse.
        return self._tokenizer.decode(list(self._ids[start : start + num_tokens])) or "#"


@dataclass(frozen=True, slots=True)
class Questions:
    """A published set, its questions in turn."""

    texts: tuple[str, ...]
    name: str

    @property
    def described(self) -> str:
        """See `Prompts`."""
        return f"{len(self.texts)} prompts of {self.name} in turn, with their own lengths"

    def prompt(self, index: int, num_tokens: int) -> str:
        """See `Prompts`; the length is the question's own."""
        del num_tokens
        return self.texts[index % len(self.texts)]


def read_questions(path: Path) -> list[str]:
    """Returns the first turn, or the prompt, of every line of a question file.

    Raises:
        ConfigError: It cannot be read, or a line has neither; names file and line.
    """
    texts = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                texts.append(_question(line, f"{path.name}, line {number}"))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    if not texts:
        raise ConfigError(f"--prompts {path} holds no prompts")
    return texts


def _question(line: str, place: str) -> str:
    try:
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["prompt"]
        if isinstance(text, str) and text:
            return text
        problem = "the prompt is empty or no text"
    except (KeyError, IndexError, TypeError, ValueError) as error:
        problem = repr(error)
    raise ConfigError(f"{place}: needs turns (a list of texts) or prompt ({problem})")


def _clipped(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return text if len(encoded.ids) <= max_tokens else text[: encoded.offsets[max_tokens - 1][1]]
