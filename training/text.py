"""Text of a training run: documents and prompts from files, and the rows that the target writes.

Rounds of written rows are a pure function of seed and round number. They are kept as files beside the run's checkpoint,
so a resumed run writes none of them again.
"""

import hashlib
import itertools
import json
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from paceline.checkpoints.corpus import load_corpus
from paceline.checkpoints.identity import fingerprint
from paceline.service.config import setting
from training.batches import TokenStore, encode_documents
from training.loop import has_fast_bfloat16, precision
from training.models import Chooser, head_weight, hidden_states, load_tokenizer, write_rows

LOG = logging.getLogger(__name__)

PREFIX_TOKENS = (16, 32, 64, 96)
LOWEST_SAMPLING_TEMPERATURE = 1e-6
HELD_OUT_PERCENT = 2

Prompt = tuple[int, ...]
"""Token ids of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Text to learn from; lengths in tokens."""

    target: Path = setting(help="Checkpoint folder of the target.")
    out: Path = setting(help="Folder for the drafter; checkpoints of the run go to OUT-run beside it.")
    corpus: Path | None = setting(
        None,
        help="Text to learn from: a folder of *.py files, or a file of JSON lines with `messages` (a chat, rendered "
        "with the target's template) or `text`. The standard library's source if neither this nor prompts are given.",
    )
    prompts_file: Path | None = setting(
        None,
        help="Prompts that the target answers, one a line: plain text, or JSON with `messages` or `prompt`. "
        "If not given, the chats of the corpus without their last answers, or pieces of its other text.",
    )
    seed: int = setting(0, help="Same seed, same run.", low=0)
    batch_tokens: int = setting(2048, help="Tokens of a step; with a corpus, a multiple of 1024.", low=64)
    row_tokens: int = setting(256, help="Tokens of a row; with a corpus, a divisor of 1024.", low=32)
    long_row_tokens: int = setting(1024, help="Tokens of long rows, which a quarter of the corpus comes in.", low=32)
    rounds: Path | None = setting(
        None,
        help="Folder of the rows that the target writes, OUT-run if not given; runs with the same settings of text "
        "share them.",
    )
    generated_share: float = setting(
        0.75, help="Share of batches that the target wrote itself; all without a corpus.", low=0, high=1
    )
    greedy_share: float = setting(0.4, help="Share of rows that the target writes at temperature 0.", low=0, high=1)
    round_rows: int = setting(32, help="Rows that the target writes at once.", low=1)
    rounds_kept: int = setting(32, help="Most recent such rounds that batches are drawn from.", low=1)
    steps_per_round: int = setting(8, help="Steps until the target writes anew.", low=1)

    @property
    def run_folder(self) -> Path:
        """Folder of checkpoints and rounds."""
        return self.out.with_name(self.out.name + "-run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of text.

    Attributes:
        ids: `[rows, row]`.
        states: As `hidden_states` returns them for the ids.
        best: The target's most likely next ids, `[rows, row]`; undefined where `taught` is False.
        taught: Whether a drafter learns the token that follows, `[rows, row]`: not where it is part of a prompt.
        temperatures: `[rows]`.
    """

    ids: torch.Tensor
    states: torch.Tensor
    best: torch.Tensor
    taught: torch.Tensor
    temperatures: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of a file; a few are held out by a hash of their ids, so that a closing measurement is honest."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


class ChatFormat:
    """Renders chats with a target's template, and encodes text without further special tokens.

    Raises:
        FileNotFoundError: The folder holds no tokenizer.
    """

    def __init__(self, target: Path) -> None:
        self.tokenizer = load_tokenizer(target)
        self._renderer: Any = cast(Any, AutoTokenizer).from_pretrained(target)

    @property
    def has_template(self) -> bool:
        """Whether the target knows chats."""
        return bool(self._renderer.chat_template)

    def text(self, messages: Sequence[Mapping[str, Any]], wants_answer: bool) -> str:
        """A chat as the target reads it; ends where an answer begins if one is wanted."""
        text: str = self._renderer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=wants_answer
        )
        return text

    def encode(self, texts: Sequence[str]) -> list[Prompt]:
        """Ids of texts, in one batch so that the tokenizer uses all cores."""
        return [tuple(row.ids) for row in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def read_documents(path: Path | None, target: Path, held_out: Collection[Prompt] = ()) -> list[str]:
    """Documents of a corpus, see `TextConfig.corpus`, without the chats whose prompts are held out.

    Raises:
        FileNotFoundError: There is no such file or folder, or no Python source in it.
        ValueError: A line is not as it must be; names it.
    """
    if path is None or path.is_dir():
        return [file.text for file in load_corpus(path).train]
    chats = ChatFormat(target)
    lines = list(_entries(path))
    documents = [_text_of(line, where, "text", chats, wants_answer=False) for where, line in lines]
    if not held_out:
        return documents
    prompts = chats.encode([_text_of(line, where, "text", chats, wants_answer=True) for where, line in lines])
    return [text for text, prompt in zip(documents, prompts, strict=True) if prompt not in held_out]


def read_prompts(config: TextConfig) -> Prompts | None:
    """Prompts of a run; None if the target continues pieces of the corpus.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not as it must be, or there is none; names it.
    """
    if config.prompts_file is not None:
        return split_prompts(prompts_of(config.prompts_file, config.target))
    if config.corpus is None or not config.corpus.is_file():
        return None
    lines = [(where, line) for where, line in _entries(config.corpus) if "messages" in line]
    if not lines:
        return None
    chats = ChatFormat(config.target)
    texts = [_text_of(line, where, "text", chats, wants_answer=True) for where, line in lines]
    return split_prompts(_measurable(chats.encode(texts), f"--corpus {config.corpus}"))


def prompts_of(path: Path, target: Path) -> list[Prompt]:
    """Prompts of a file, see `TextConfig.prompts_file`; a plain text is a user's message if the target knows chats.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not as it must be, or there is no prompt of two tokens or more; names it.
    """
    chats = ChatFormat(target)
    texts = [_text_of(line, where, "prompt", chats, wants_answer=True) for where, line in _entries(path)]
    return _measurable(chats.encode(texts), f"--prompts-file {path}")


def _measurable(prompts: Sequence[Prompt], where: str) -> list[Prompt]:
    """Prompts that a drafter can guess after: the first token has no state before it."""
    found = [prompt for prompt in prompts if len(prompt) > 1]
    if not found:
        raise ValueError(f"{where} holds no prompt of two tokens or more")
    return found


def split_prompts(prompts: Sequence[Prompt]) -> Prompts:
    """Holds some prompts out, at least one."""
    unique = list(dict.fromkeys(prompts))
    held_out = [prompt for prompt in unique if _percentile(prompt) < HELD_OUT_PERCENT] or unique[-1:]
    kept_away = set(held_out)
    train = [prompt for prompt in unique if prompt not in kept_away]
    # A measurement on the only prompt is better than none.
    return Prompts(train=tuple(train or held_out), held_out=tuple(held_out))


def _percentile(prompt: Prompt) -> int:
    digest = hashlib.sha256(np.asarray(prompt, dtype="<u4").tobytes()).digest()
    return int.from_bytes(digest[:4], "big") % 100


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines of a file, and their places; a line of plain text is a prompt."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _json_object(line, where) if line.startswith("{") else {"prompt": line}


def _json_object(line: str, where: str) -> dict[str, Any]:
    """A line's fields that are not null; `messages` is a list of objects."""
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    found = {name: field for name, field in value.items() if field is not None}
    chat = found.get("messages", [{}])
    if not (isinstance(chat, list) and chat and all(isinstance(message, dict) for message in chat)):
        raise ValueError(f"{where}: `messages` must be a list of one object or more, is {json.dumps(chat):.80}")
    return found


def _text_of(line: Mapping[str, Any], where: str, key: str, chats: ChatFormat, *, wants_answer: bool) -> str:
    """Text of a line that has a chat, or a string under `key`."""
    if "messages" in line:
        messages = _unanswered(line["messages"]) if wants_answer else line["messages"]
        return _chat_text(chats, messages, where, wants_answer)
    if not isinstance(line.get(key), str):
        raise ValueError(f"{where} must have `messages` or `{key}`, has {', '.join(line) or 'nothing'}")
    text: str = line[key]
    if not wants_answer or not chats.has_template:
        return text
    return _chat_text(chats, [{"role": "user", "content": text}], where, True)


def _unanswered(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """A chat without the answers that end it."""
    last = len(messages)
    while last and messages[last - 1].get("role") == "assistant":
        last -= 1
    return messages[:last]


def _chat_text(chats: ChatFormat, messages: Sequence[Mapping[str, Any]], where: str, wants_answer: bool) -> str:
    if not chats.has_template:
        raise ValueError(f"{where} has a chat, but the target has no chat template")
    try:
        return chats.text(messages, wants_answer)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise ValueError(f"{where}: the chat template refuses the chat: {error}") from error


class TextSource:
    """Batches of text for one run: rounds that the target writes when they are first needed, and corpus.

    Args:
        config: Row length, rows in a round, shares of temperatures.
        target: In evaluation mode, on its device.
        taps: Further layers whose outputs `Batch.states` holds.

    Raises:
        FileNotFoundError: The target has no tokenizer, or there is no such corpus or file.
        ValueError: A line of a file is not as it must be.
    """

    def __init__(self, config: TextConfig, target: PreTrainedModel, taps: Sequence[int] = ()) -> None:
        self._config, self._target, self._taps = config, target, tuple(taps)
        prompts = read_prompts(config)
        self._prompts = _fitting(prompts, config)
        # The only prompt is both learnt from and held out.
        held_out = set(prompts.held_out).difference(prompts.train) if prompts else ()
        self._store = None if self._prompts and config.corpus is None else _corpus_of(config, held_out)
        self._ends = end_ids_of(target) if self._prompts else frozenset()
        self._rounds: OrderedDict[int, Batch] = OrderedDict()
        self._key = self._settings_key()
        self._folder = config.rounds or config.run_folder
        LOG.info(
            "written rows are in %s, %d rounds so far", self._folder, len(list(self._folder.glob(self._file("*"))))
        )

    def batch(self, step: int) -> Batch:
        """Target-written rows, or corpus rows (every fourth of those batches with long rows)."""
        config, device = self._config, self._target.device
        rng = np.random.default_rng((config.seed, 5, step))
        if self._store is None or rng.random() < config.generated_share:
            return self._written_rows(step, max(1, config.batch_tokens // config.row_tokens))
        length = config.long_row_tokens if rng.random() < 0.25 else config.row_tokens
        ids = self._store.batch(step, config.batch_tokens, length)[:, :-1].to(device)
        with torch.no_grad(), precision(device, has_fast_bfloat16(device)):
            states = hidden_states(self._target, ids, self._taps)
        return Batch(
            ids=ids,
            states=states,
            best=best_ids(self._target, states),
            taught=torch.ones_like(ids, dtype=torch.bool),
            temperatures=torch.ones(ids.shape[0], device=device),
        )

    def token_shares(self, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Share of each id in the run's text, as corpus, prompts and the first round have it."""
        share = self._config.generated_share if self._store else 1.0
        written = [self._round(0).ids.flatten().cpu().numpy(), *map(np.asarray, self._prompts or ())]
        mixed = share * _shares(np.concatenate(written), vocab_size)
        if self._store:
            mixed = mixed + (1 - share) * _shares(self._store.tokens, vocab_size)
        return mixed

    def _written_rows(self, step: int, count: int) -> Batch:
        """`count` random rows of the rounds that are current at this step."""
        config, device = self._config, self._target.device
        newest = step // config.steps_per_round
        current = [self._round(k) for k in range(max(0, newest - config.rounds_kept + 1), newest + 1)]
        rng = np.random.default_rng((config.seed, 4, step))
        picks = rng.integers(len(current) * config.round_rows, size=count)
        rows = [(current[pick // config.round_rows], int(pick % config.round_rows)) for pick in picks]
        parts = {
            field.name: torch.stack([getattr(batch, field.name)[row] for batch, row in rows]).to(device)
            for field in fields(Batch)
        }
        if not has_fast_bfloat16(device):
            parts["states"] = parts["states"].float()
        return Batch(**parts)

    def _round(self, number: int) -> Batch:
        if number not in self._rounds:
            path = self._folder / self._file(f"{number:05}")
            if not path.is_file():
                self._keep(self._write_round(number), path)
            # Rows are read from the file when a batch needs them: rounds of large targets exceed memory.
            self._rounds[number] = Batch(**torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            while len(self._rounds) > self._config.rounds_kept:
                self._rounds.popitem(last=False)
        return self._rounds[number]

    def _keep(self, batch: Batch, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({field.name: getattr(batch, field.name).cpu() for field in fields(Batch)}, partial)
        partial.replace(path)

    def _file(self, number: str) -> str:
        return f"round-{self._key}-{number}.pt"

    def _settings_key(self) -> str:
        """Differs where rounds differ."""
        config = self._config
        weights = sorted(config.target.glob("*.safetensors"))
        text: object = self._prompts
        if text is None:
            assert self._store is not None
            text = (self._store.begin_id, hashlib.sha256(self._store.tokens.tobytes()).hexdigest())
        said = (
            fingerprint([(config.target / "config.json").read_bytes()], weights),
            sorted(self._ends),
            config.seed,
            config.row_tokens,
            config.round_rows,
            config.greedy_share,
            self._taps,
            text,
        )
        return hashlib.sha256(repr(said).encode()).hexdigest()[:8]

    def _write_round(self, number: int) -> Batch:
        config, device = self._config, self._target.device
        rng = np.random.default_rng((config.seed, 3, number))
        prompts = self._prompts_of_round(rng)
        drawn = rng.uniform(0.2, 1.0, size=config.round_rows)
        drawn[rng.random(config.round_rows) < config.greedy_share] = 0.0
        temperatures = torch.tensor(drawn, dtype=torch.float32, device=device)
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        choose = sampling_chooser(temperatures, generator)
        bar = tqdm(
            total=config.row_tokens, desc=f"round {number}: {config.round_rows} rows", unit="token", mininterval=5
        )
        # A single autocast context around all steps, so that weights are converted once.
        with bar, precision(device, has_fast_bfloat16(device)):
            rows = write_rows(
                self._target, prompts, config.round_rows, config.row_tokens, choose, self._taps, self._ends, bar.update
            )
        return Batch(
            ids=rows.ids[:, :-1],
            states=rows.states.bfloat16(),
            best=rows.best,
            taught=rows.taught if self._prompts else torch.ones_like(rows.taught),
            temperatures=temperatures,
        )

    def _prompts_of_round(self, rng: np.random.Generator) -> Iterator[Prompt]:
        config = self._config
        if self._prompts is None:
            assert self._store is not None
            length = int(rng.choice([n for n in PREFIX_TOKENS if n < config.row_tokens]))
            return iter(_prefixes(self._store, rng, config.round_rows, length))
        # Without end: short answers leave place for further prompts.
        return (self._prompts[int(rng.integers(len(self._prompts)))] for _ in itertools.count())


def best_ids(target: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """The target's most likely next ids `[rows, row]`, by its states of that shape."""
    weight = head_weight(target).detach()
    final = states[..., : weight.shape[1]].float()
    return torch.stack([(row @ weight.T).argmax(dim=-1) for row in final])


def _shares(ids: np.ndarray[Any, Any], vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    counts: np.ndarray[tuple[int], np.dtype[np.float64]] = np.bincount(
        ids.astype(np.int64), minlength=vocab_size
    ) / len(ids)
    return counts


def _fitting(prompts: Prompts | None, config: TextConfig) -> tuple[Prompt, ...] | None:
    """Prompts that leave half a row for the answer.

    Raises:
        ValueError: There is none.
    """
    if prompts is None:
        return None
    found = tuple(prompt for prompt in prompts.train if 2 * len(prompt) <= config.row_tokens)
    LOG.info(
        "%d prompts, %d of them longer than half a row of %d tokens and left out",
        len(prompts.train),
        len(prompts.train) - len(found),
        config.row_tokens,
    )
    if not found:
        shortest = min(map(len, prompts.train))
        raise ValueError(
            f"--row-tokens is {config.row_tokens}, but prompts must fit half of it, and the shortest has {shortest} "
            "tokens"
        )
    return found


def end_ids_of(target: PreTrainedModel) -> frozenset[int]:
    """Ids after which the target's answer has ended."""
    ids = getattr(target.generation_config, "eos_token_id", None) or target.config.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [ids])


def _corpus_of(config: TextConfig, held_out: Collection[Prompt]) -> TokenStore:
    """The corpus in the target's ids.

    Raises:
        ValueError: It holds no more than the chats of held-out prompts.
    """
    shape = json.loads((config.target / "config.json").read_text(encoding="utf-8"))
    end = shape.get("eos_token_id")
    documents = read_documents(config.corpus, config.target, held_out)
    if not documents:
        raise ValueError(f"--corpus {config.corpus} holds no text but that of {len(held_out)} held-out prompts")
    LOG.info("encoding %d documents, %.1f MB", len(documents), sum(map(len, documents)) / 1e6)
    return encode_documents(
        load_tokenizer(config.target),
        documents,
        shape.get("bos_token_id"),
        end[0] if isinstance(end, list) else end,
        config.seed,
    )


def _prefixes(store: TokenStore, rng: np.random.Generator, rows: int, length: int) -> list[Prompt]:
    """Pieces of `length` tokens cut anywhere in the corpus, half of them behind a begin token."""
    starts = rng.integers(len(store.tokens) - length, size=rows)
    ids = np.stack([store.tokens[at : at + length].astype(np.int64) for at in starts])
    if store.begin_id is not None:
        ids[rng.random(rows) < 0.5, 0] = store.begin_id
    return [tuple(row) for row in ids.tolist()]


def sampling_chooser(temperatures: torch.Tensor, generator: torch.Generator) -> Chooser:
    """Plain sampling at a temperature per row `[batch]`; one random number a row, so it is cheap."""
    scale = temperatures.unsqueeze(1).clamp_min(LOWEST_SAMPLING_TEMPERATURE)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        mass = torch.softmax(logits / scale, dim=-1).cumsum(dim=-1)
        uniform = torch.rand(len(logits), 1, generator=generator, device=generator.device)
        # The sum may end a little below 1; scaling by it keeps the last id reachable and no other.
        place = torch.searchsorted(mass, uniform.to(mass.device) * mass[:, -1:])
        return place.squeeze(1).clamp_max(mass.shape[1] - 1)

    return choose
