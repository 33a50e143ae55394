"""Measures how often a drafter's token is the target's, along the target's own text."""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from paceline.checkpoints.corpus import unseen_prompts
from training import eagle3, medusa
from training.models import (
    Chooser,
    Drafted,
    head_weight,
    hidden_states,
    load_model,
    load_tokenizer,
    write_rows,
)
from training.text import Prompt, end_ids_of

PROMPT_TOKENS = 64
CHAINS = (3, 5, 7)
TEMPERATURES = (0.0, 0.7, 1.0)
MIN_TEMPERATURE = 1e-6


class ChainDrafter(Protocol):
    """A drafter that guesses chains along a text."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it reads."""

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Token ids of its logits, ascending; None if these are all ids of the vocabulary."""

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text, one `Drafted` a position.

        Args:
            ids: The text, `[rows, n]`.
            states: The target's, with `taps`, as `hidden_states` returns them.
            positions: Guesses of a chain; a drafter may give fewer.
        """


class ModelChain:
    """A draft model, which reads tokens alone."""

    taps: tuple[int, ...] = ()
    draft_ids: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text; the state at a place is the same in every chain."""
        own, head = hidden_states(self._model, ids), head_weight(self._model)
        return [Drafted(states=own[:, 1 + position :], head=head) for position in range(positions)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance of draft chains that begin at every place of a text, at one temperature.

    `accepted`: per position of a chain, the share of chains whose drafts up to there are all the
    target's tokens; both choose with the same Gumbel noise (at 0: both greedy). Of first drafts:
    `classic_bound`, mean of 1 - TV, the most any rule can accept; `top_2`, `top_4`, the target's token
    is among the best perturbed scores. `mean_length`: per chain length, tokens committed a round, the
    target's own included.
    """

    temperature: float
    num_tokens: int
    accepted: tuple[float, ...]
    classic_bound: float
    top_2: float
    top_4: float
    mean_length: dict[int, float]


def acceptance_table(
    target_folder: Path,
    drafter_folder: Path,
    prompts: Sequence[Prompt] | None,
    num_prompts: int,
    num_new: int,
    seed: int,
) -> str:
    """A drafter's acceptance after prompts, as a Markdown table.

    Args:
        target_folder: Checkpoint of the target.
        drafter_folder: Checkpoint of the drafter.
        prompts: To choose from, of two tokens or more each; None: Python code that the demo pair never saw.
        num_prompts: Prompts at most.
        num_new: Tokens after each at most; answers end at an end token, code does not.
        seed: Of the choice and of the noise.

    Raises:
        FileNotFoundError: A folder lacks config.json, weights or tokenizer.json.
        ValueError: The two do not fit, or there are too few unseen prompts.
    """
    target = load_model(target_folder)
    drafter = load_drafter(drafter_folder, target)
    if prompts is None:
        chosen = encode_prompts(load_tokenizer(target_folder), unseen_prompts(num_prompts, seed))
        end_ids: Collection[int] = ()
    else:
        chosen = random.Random(seed).sample(list(prompts), min(num_prompts, len(prompts)))
        end_ids = end_ids_of(target)
    return table([measure(target, drafter, chosen, value, num_new, seed, end_ids) for value in TEMPERATURES])


def load_drafter(folder: Path, target: PreTrainedModel) -> ChainDrafter:
    """The drafter of a folder, float32, for this target.

    Raises:
        FileNotFoundError: The folder lacks config.json or weights.
        ValueError: It was made for a target of another vocabulary or shape.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures", [])
    if medusa.ARCHITECTURE in architectures:
        return medusa.load_medusa(folder, target)
    if eagle3.ARCHITECTURE in architectures:
        return eagle3.load_eagle3(folder, target)
    model = load_model(folder)
    sizes = (target.config.vocab_size, model.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise ValueError(f"vocabulary of the target is {sizes[0]}, of the drafter {sizes[1]}")
    return ModelChain(model)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[Prompt]:
    """Ids of prompts, all cut to the shortest (`PROMPT_TOKENS` at most)."""
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    length = min(PROMPT_TOKENS, *(len(ids) for ids in encoded))
    return [tuple(ids[:length]) for ids in encoded]


@torch.no_grad()
def measure(
    target: PreTrainedModel,
    drafter: ChainDrafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    num_new: int = 128,
    seed: int = 0,
    end_ids: Collection[int] = (),
) -> Acceptance:
    """Let the target continue the prompts, then have the drafter guess a chain from every place of that text.

    Args:
        target: float32.
        drafter: float32, for this target.
        prompts: ids, two or more each.
        temperature: 0 is greedy.
        num_new: tokens written after each prompt at most.
        seed: of the noise both models share.
        end_ids: ids that end a text.
    """
    noise_source = torch.Generator().manual_seed(seed)
    chooser = gumbel_chooser(temperature, noise_source)
    before, length = min(map(len, prompts)), max(map(len, prompts)) + num_new - 1
    rows = write_rows(target, iter(prompts), len(prompts), length, chooser, drafter.taps, end_ids)
    head = head_weight(target)
    text = _Text(
        written=rows.ids[:, before:],
        states=rows.states[:, before - 1 :, : head.shape[1]],
        target_head=head,
        temperature=temperature,
        seed=seed,
    )
    # Short answers may leave no place for the longest chains.
    positions = min(max(CHAINS), text.written.shape[1])
    chains = drafter.chain(rows.ids[:, :-1], rows.states, positions)
    # Place 0 guesses token 2.
    tallies = [
        text.tally(replace(drafted, states=drafted.states[:, before - 2 :]), position, drafter.draft_ids)
        for position, drafted in enumerate(chains)
    ]
    taught = rows.taught & (rows.taught.cumsum(dim=1) <= num_new)
    return _acceptance(temperature, tallies, taught[:, before - 1 :])


def _acceptance(temperature: float, tallies: Sequence[torch.Tensor], taught: torch.Tensor) -> Acceptance:
    """Sums up tallies, of the places `[rows, places]` that the target wrote."""
    places = taught.shape[1]
    runs = accepted_runs([tally[..., 0].bool() & taught[:, k:] for k, tally in enumerate(tallies)])
    inside = [taught[:, : places - k] & taught[:, k:] for k in range(len(tallies))]
    first = tallies[0][taught].mean(dim=0).tolist()
    answers = [
        [run for run, is_taught in zip(*row, strict=True) if is_taught]
        for row in zip(runs.tolist(), taught.tolist(), strict=True)
    ]
    lengths = sorted({min(gamma, len(tallies)) for gamma in CHAINS})
    return Acceptance(
        temperature=temperature,
        num_tokens=int(taught.sum()),
        accepted=tuple(float((runs[:, : places - k] > k)[kept].float().mean()) for k, kept in enumerate(inside)),
        top_2=first[1],
        top_4=first[2],
        classic_bound=first[3],
        mean_length={gamma: mean_chain_length(answers, gamma) for gamma in lengths},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A text of the target: ids `[rows, places]`, the states `[rows, places, hidden]` that chose them."""

    written: torch.Tensor
    states: torch.Tensor
    target_head: torch.Tensor
    temperature: float
    seed: int

    def tally(self, drafted: Drafted, skipped: int, draft_ids: torch.Tensor | None) -> torch.Tensor:
        """`[rows, places, 4]` of one position's guesses: in the drafter's top 1, 2, 4, and 1 - TV.

        Args:
            drafted: states from the place on that guesses the first written token.
            skipped: written tokens before the first guessed one, the position in the chain.
            draft_ids: as `ChainDrafter.draft_ids`.
        """
        noise_source = torch.Generator().manual_seed(self.seed)
        columns = []
        for place in range(self.written.shape[1]):
            noise = gumbel((len(self.written), len(self.target_head)), noise_source).to(self.written.device)
            if place >= skipped:
                draft_logits = drafted.states[:, place - skipped] @ drafted.head.T
                columns.append(self._tally_place(place, draft_logits, noise, draft_ids))
        return torch.stack(columns, dim=1)

    def _tally_place(
        self, place: int, draft_logits: torch.Tensor, noise: torch.Tensor, draft_ids: torch.Tensor | None
    ) -> torch.Tensor:
        scale = max(self.temperature, MIN_TEMPERATURE)
        target_probs = torch.softmax(self.states[:, place] @ self.target_head.T / scale, dim=-1)
        wanted = self.written[:, place, None]
        if draft_ids is not None:
            target_probs, noise = target_probs[:, draft_ids], noise[:, draft_ids]
        scores = draft_logits / scale + (noise if self.temperature else 0.0)
        best = scores.topk(4, dim=-1).indices
        hits = (best if draft_ids is None else draft_ids[best]) == wanted
        overlap = torch.minimum(target_probs, torch.softmax(draft_logits / scale, dim=-1)).sum(dim=-1)
        columns = [hits[:, :1].any(1), hits[:, :2].any(1), hits.any(1)]
        return torch.stack([*(column.float() for column in columns), overlap], dim=1)


def accepted_runs(matches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Accepted drafts `[rows, places]` of the chain that begins at each place.

    Args:
        matches: per position of a chain, whether its guess is the target's token, `[rows, places left]`;
            chains near the text's end are cut short by it.
    """
    alive = torch.ones_like(matches[0])
    runs = torch.zeros_like(matches[0], dtype=torch.int64)
    for found in matches:
        left = found.shape[1]
        alive[:, :left] &= found
        runs[:, :left] += alive[:, :left]
    return runs


def mean_chain_length(runs: Sequence[Sequence[int]], gamma: int) -> float:
    """Tokens committed a round when chains of `gamma` drafts walk along each row.

    Args:
        runs: per row and place, accepted drafts of a chain that begins there (of `gamma` or longer ones).
        gamma: drafts a round.
    """
    rounds = committed = 0
    for row in runs:
        place = 0
        # A round that the row's end cuts short would count too few: it is left out.
        while place + gamma < len(row):
            tokens = min(row[place], gamma) + 1
            place += tokens
            committed += tokens
            rounds += 1
    return committed / rounds if rounds else 0.0


def table(results: Sequence[Acceptance]) -> str:
    """A Markdown table, one row a temperature."""
    positions = " / ".join(str(1 + k) for k in range(len(results[0].accepted)))
    chains = " / ".join(str(gamma) for gamma in results[0].mean_length)
    lines = [
        f"| temperature | accepted up to draft {positions} | classic bound (1 - TV) | target in draft top 2 / 4 "
        f"| mean length, chain {chains} | tokens |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        accepted = " / ".join(f"{share:.3f}" for share in result.accepted)
        lengths = " / ".join(f"{length:.2f}" for length in result.mean_length.values())
        lines.append(
            f"| {result.temperature:g} | {accepted} | {result.classic_bound:.3f} "
            f"| {result.top_2:.3f} / {result.top_4:.3f} | {lengths} | {result.num_tokens} |"
        )
    return "\n".join(lines)


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard Gumbel noise, float32, drawn on the generator's device."""
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))


def gumbel_chooser(temperature: float, generator: torch.Generator) -> Chooser:
    """Argmax of logits over temperature plus Gumbel noise; noise is drawn for greedy rows too."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        noise = gumbel((logits.shape[0], logits.shape[1]), generator).to(logits.device)
        if temperature == 0:
            return logits.argmax(dim=-1)
        return (logits / temperature + noise).argmax(dim=-1)

    return choose
