"""Prompts: pieces of code, prose and tables that the demo pair never saw, or the questions of a published set."""

from __future__ import annotations

import ast
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from paceline.checkpoints.corpus import SourceFile, load_corpus
from paceline.core.errors import ConfigError

PROSE_CHARS = 320
# Returns the prompt of a request by its number and the length, in tokens, that a trace names for it.
Prompts = Callable[[int, int], str]


def prose_prompts(count: int) -> list[str]:
    """Openings of long docstrings of files that the pair never saw."""
    found: list[str] = []
    for file in _unseen_files():
        for node in ast.walk(ast.parse(file.text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= PROSE_CHARS:
                    found.append(f'"""{text[:PROSE_CHARS].rpartition(" ")[0]}')
    return random.Random(0).sample(found, count)


def table_prompts(count: int) -> list[str]:
    """Tables of constants that repeat themselves, a few rows each."""
    shapes = (
        "    ('{name}', {number}, 'the {name} of it'),",
        "    '{name}': {{'code': {number}, 'help': '{name} {number}'}},",
        "    {name} = register('{name}', code={number}, default=None)",
        "    self.assertEqual(parse('{name} {number}'), ('{name}', {number}))",
    )
    names = ["read", "write", "open", "close", "seek", "flush", "truncate", "fileno"]
    prompts: list[str] = []
    for number in range(count):
        rows = [shapes[number % len(shapes)].format(name=name, number=10 * number + k) for k, name in enumerate(names)]
        prompts.append(f"TABLE_{number} = [\n" + "\n".join(rows) + "\n")
    return prompts


def open_prompts(path: Path | None, checkpoint: Path, *, max_tokens: int, seed: int) -> tuple[Prompts, str]:
    """Returns the prompts of a question file in turn, or pieces of unseen code; and what they are, in words.

    Args:
        path: A question file; None: code.
        checkpoint: Folder whose tokenizer counts tokens.
        max_tokens: Questions are clipped to this.
        seed: Another seed, other pieces of code.

    Raises:
        ConfigError: The file is no question file.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    if path is None:
        return _code(tokenizer, seed), "Python source that the demo pair never saw, cut to the trace's lengths"
    texts = [_clipped(tokenizer, text, max_tokens) for text in read_questions(path)]
    described = f"{len(texts)} prompts of {path.name} in turn, with their own lengths"
    return lambda index, num_tokens: texts[index % len(texts)], described


def _code(tokenizer: Tokenizer, seed: int) -> Prompts:
    """Pieces that begin with a line; every request has one of its own."""
    text = "\n".join(file.text for file in _unseen_files())
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = encoded.ids
    starts = [at for at, (start, _) in enumerate(encoded.offsets) if start and text[start - 1] == "\n"]

    def prompt(index: int, num_tokens: int) -> str:
        start = min(random.Random(f"{seed}/{index}").choice(starts), max(0, len(ids) - num_tokens))
        # Encoded again, the text may be a token longer or shorter. Never empty: a gateway would refuse it.
        return str(tokenizer.decode(ids[start : start + num_tokens])) or "#"

    return prompt


def _unseen_files() -> list[SourceFile]:
    return [file for file in load_corpus().held_out if not file.is_test]


def read_questions(path: Path) -> list[str]:
    """Returns the first turn, or the prompt, of every line of a question file.

    Raises:
        ConfigError: It cannot be read, or a line has neither; names file and line.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            texts = [_question(line, f"{path.name}, line {number}") for number, line in enumerate(lines, start=1)]
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
