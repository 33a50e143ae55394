"""The demo pair's text: source code of the Python standard library of the running interpreter.

Every machine that can run Paceline already holds this corpus, so training needs no download. The
split depends on relative paths alone: a file held out under one interpreter is held out under all.
"""

import hashlib
import random
import re
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HELD_OUT_PERCENT = 2
MAX_FILE_BYTES = 600_000
MIN_PROMPT_CHARS = 210
MAX_PROMPT_CHARS = 290

WELL_KNOWN_HELD_OUT = frozenset(
    {
        "bisect.py",
        "csv.py",
        "fractions.py",
        "heapq.py",
        "json/decoder.py",
        "queue.py",
        "shlex.py",
        "statistics.py",
        "textwrap.py",
        "wsgiref/headers.py",
    }
)
"""Modules that many readers know, always held out so that prompts look familiar."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "idlelib"})
_TEST_FOLDERS = frozenset({"test", "tests"})
_DEFINITION = re.compile(r"^ *(?:async def|def|class) ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the library; `path` is relative to the library's root, with forward slashes."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite, which some distributions leave out."""
        return bool(_TEST_FOLDERS.intersection(self.path.split("/")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The two halves of the split, each ordered by path."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def is_held_out(path: str) -> bool:
    """Whether the file at this relative path is kept away from training."""
    if path in WELL_KNOWN_HELD_OUT:
        return True
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


@lru_cache(maxsize=2)
def load_corpus(root: Path | None = None) -> Corpus:
    """Read and split the library.

    Args:
        root: the library's folder; the running interpreter's when None.

    Raises:
        FileNotFoundError: the folder holds no Python source.
    """
    folder = root or Path(sysconfig.get_path("stdlib"))
    files = _read_files(folder)
    if not files:
        raise FileNotFoundError(f"no Python source under {folder}")
    held_out = tuple(file for file in files if is_held_out(file.path))
    # A copy under another name must not carry held-out text into training: copies are dropped
    # before the split, held-out files first (see _read_files).
    return Corpus(train=tuple(file for file in files if not is_held_out(file.path)), held_out=held_out)


def unseen_prompts(count: int, seed: int = 0, root: Path | None = None) -> list[str]:
    """Openings of functions and classes the pair never saw, about 60 to 100 tokens each.

    Test files are left out, because some distributions ship none: the same Python version gives
    the same prompts on every machine.

    Args:
        count: how many prompts.
        seed: another seed, another order of the same candidates.
        root: as in `load_corpus`.

    Raises:
        ValueError: the held-out files have fewer openings than `count`.
    """
    candidates = [prompt for file in load_corpus(root).held_out if not file.is_test for prompt in _openings(file.text)]
    unique = list(dict.fromkeys(candidates))
    if count > len(unique):
        raise ValueError(f"count is {count}, but held-out files give {len(unique)} prompts")
    return random.Random(seed).sample(unique, count)


def _read_files(folder: Path) -> list[SourceFile]:
    paths = sorted(
        path for path in folder.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    )
    named = [(path.relative_to(folder).as_posix(), path) for path in paths]
    named.sort(key=lambda item: (not is_held_out(item[0]), item[0]))
    seen: set[bytes] = set()
    files: list[SourceFile] = []
    for name, path in named:
        text = _read_text(path)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            files.append(SourceFile(path=name, text=text))
    return sorted(files, key=lambda file: file.path)


def _read_text(path: Path) -> str | None:
    """The file's text, or None where it teaches nothing: empty, huge, not UTF-8, or a code page."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    is_code_page = "decoding_table = (" in text or "decoding_map = codecs" in text
    if not text.strip() or len(raw) > MAX_FILE_BYTES or is_code_page:
        return None
    return text


def _openings(text: str) -> list[str]:
    """Pieces that begin at a definition and end at a line's end, within the character limits."""
    found = []
    for match in _DEFINITION.finditer(text):
        piece = text[match.start() : match.start() + MAX_PROMPT_CHARS]
        end = piece.rfind("\n") + 1
        if end >= MIN_PROMPT_CHARS:
            found.append(piece[:end])
    return found
