"""A pair of simulated models: what a profile, a tokenizer and a few laws make of `--engine simulated`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from paceline.checkpoints.identity import eos_token_ids, fingerprint, vocab_hash
from paceline.checkpoints.json_file import read_object
from paceline.checkpoints.source import served_name
from paceline.core.errors import ConfigError
from paceline.core.messages import SIMULATED, ModelIdentity
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.draft_warm_up import warm_up
from paceline.engine.drafter import DraftEngine
from paceline.simulated.device import GuessTable, Pace, SimulatedDraft, SimulatedTarget
from paceline.simulated.guesses import DrawnGuesses, RecordedGuesses, RecordedPlace, texts_of
from paceline.simulated.profile import DrafterFacts, Profile, read_profile
from paceline.simulated.roofline import computed_profile
from paceline.simulated.text import TextLaw, words_of

# Longest session; pages may hold less.
MOST_CONTEXT = 131_072
# Places of a law with one chance.
NUM_PLACES = 4096


def find_profile(name: str) -> Profile:
    """Returns the profile of a file, or of a name such as `70b+1b@4xh100+l4`.

    Raises:
        ConfigError: There is no such file, and the name is in another form; or the file is wrong.
    """
    return read_profile(Path(name)) if name.endswith(".json") or Path(name).is_file() else computed_profile(name)


def guesses_at(chance: float) -> RecordedGuesses:
    """Guesses of which the first is right with one chance everywhere, as confident as that."""
    second = min(chance, 1.0 - chance) / 2
    draws = np.random.default_rng(0).random(NUM_PLACES)
    ranks = [0 if draw < chance else 1 if draw < chance + second else None for draw in draws]
    return RecordedGuesses([[RecordedPlace(rank=rank, confidences=(chance, second)) for rank in ranks]])


def guesses_of(profile: Profile, acceptance: float | None = None) -> RecordedGuesses:
    """What simulated drafters guess: of one chance, or by the profile, where no session has luck of its own."""
    if acceptance is not None:
        return guesses_at(acceptance)
    truth = profile.truth
    if isinstance(truth, DrawnGuesses):
        return texts_of(replace(truth, session_spread=0.0))
    assert isinstance(truth, RecordedGuesses), "profiles have a law or texts"
    return truth


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What both services have to agree on.

    Attributes:
        profile: Facts of the devices.
        folder: With the tokenizer whose words texts are made of; no weights are read.
        mean_length: Mean length of a text in tokens; 0: only `max_tokens` ends it.
        acceptance: Chance that a first guess is right; None: by the profile's law.
    """

    profile: Profile
    folder: Path
    mean_length: float = 0.0
    acceptance: float | None = None

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"--model {self.folder}: needs a tokenizer.json: {error}") from error

    @cached_property
    def _eos_token_ids(self) -> tuple[int, ...]:
        config = self.folder / "config.json"
        found = read_object(config).get("eos_token_id") if config.is_file() else None
        return eos_token_ids(self.folder, found, self._vocab_size)

    @property
    def _vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _law(self) -> TextLaw:
        ends = self._eos_token_ids
        return TextLaw(
            words=words_of(self._tokenizer), eos_token_id=ends[0] if ends else None, mean_length=self.mean_length
        )

    def identity(self, name: str) -> ModelIdentity:
        """What a service of this model announces.

        Args:
            name: Name for users; empty: the folder's.
        """
        law = f"{self.profile.name} {self.mean_length}"
        return ModelIdentity(
            name=name or served_name(self.folder),
            vocab_hash=vocab_hash(self.folder),
            vocab_size=self._vocab_size,
            context_len=min(self.profile.target.kv_tokens, MOST_CONTEXT),
            eos_token_ids=self._eos_token_ids,
            weights_hash=fingerprint([law.encode()], []),
            arithmetic=SIMULATED,
        )

    def target(self) -> SimulatedTarget:
        """Makes the target model."""
        return SimulatedTarget(self._law, Pace(self.profile.target), self._vocab_size)

    def draft(self, facts: DrafterFacts) -> SimulatedDraft:
        """Makes the draft model on its device."""
        table = GuessTable.of(guesses_of(self.profile, self.acceptance), self._vocab_size)
        return SimulatedDraft(self._law, Pace(facts), self._vocab_size, table)

    def draft_engine(
        self, facts: DrafterFacts, identity: ModelIdentity, *, num_blocks: int | None = None
    ) -> DraftEngine:
        """Makes an engine with the draft model, and runs its first steps.

        Args:
            facts: Of its device.
            identity: What it calls itself.
            num_blocks: Pages; None: as many as the device has.
        """
        engine = DraftEngine(
            decoder=self.draft(facts),
            identity=identity,
            num_blocks=num_blocks or facts.kv_tokens // BLOCK_SIZE,
            limits=facts.limits,
            clock=time.monotonic,
        )
        warm_up(engine, 0)
        return engine
