"""A pair of simulated models: what a profile, a tokenizer and a few laws make of `--engine simulated`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from paceline.checkpoints.identity import eos_token_ids, fingerprint, vocab_hash
from paceline.checkpoints.json_files import read_object
from paceline.checkpoints.source import served_name
from paceline.checkpoints.tokenizer import read_tokenizer
from paceline.core.errors import ConfigError
from paceline.core.messages import SIMULATED, ModelIdentity
from paceline.core.pages import BLOCK_SIZE, LEAST_PAGES
from paceline.engine.drafter import DraftEngine
from paceline.simulated.device import GuessTable, Pace, SimulatedDraft, SimulatedTarget
from paceline.simulated.guesses import RecordedGuesses, drawn, guesses_at
from paceline.simulated.profile import SHIPPED, DeviceFacts, DrafterFacts, Profile, read_profile
from paceline.simulated.roofline import computed_profile
from paceline.simulated.text import TextLaw, words_of

# Longest session; pages may hold less.
MOST_CONTEXT = 131_072


def find_profile(name: str) -> Profile:
    """Returns the profile of a file, that of a name in the package (`demo`), or one such as `70b+1b@4xh100+h100`.

    Raises:
        ConfigError: There is no such file, and the name is in another form; or the file is wrong.
    """
    path, shipped = Path(name), SHIPPED / f"{name}.json"
    if shipped.is_file() and not path.is_file():
        path = shipped
    return read_profile(path) if path.is_file() or path.suffix == ".json" else computed_profile(name)


def num_pages(facts: DeviceFacts, asked: int | None) -> int:
    """Pages of KV on a device: as many as it has, or fewer where that is asked for.

    Raises:
        ConfigError: `--num-kv-blocks` is more than it has, or it has too few for any session.
    """
    most = facts.kv_tokens // BLOCK_SIZE
    if not LEAST_PAGES <= (asked or most) <= most:
        raise ConfigError(
            f"--num-kv-blocks must be from {LEAST_PAGES} to the {most} pages that the profile's kv_tokens of "
            f"{facts.kv_tokens} on {facts.name} fill, got {asked or most}"
        )
    return asked or most


def guesses_of(profile: Profile, acceptance: float | None = None) -> RecordedGuesses:
    """What simulated drafters guess: with one chance everywhere, or as the profile says."""
    if acceptance is not None:
        return guesses_at(acceptance)
    return profile.truth if isinstance(profile.truth, RecordedGuesses) else drawn(profile.truth)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPair:
    """A target and its drafter, apart from their devices.

    Attributes:
        law: Of the texts.
    """

    law: TextLaw
    vocab_size: int
    guesses: RecordedGuesses

    def target(self, pace: Pace) -> SimulatedTarget:
        """Makes the target model on a device."""
        return SimulatedTarget(self.law, pace, self.vocab_size)

    def draft(self, pace: Pace) -> SimulatedDraft:
        """Makes the draft model on a device."""
        return SimulatedDraft(self.law, pace, self.vocab_size, GuessTable.of(self.guesses, self.vocab_size))

    def draft_engine(self, facts: DrafterFacts, pace: Pace, identity: ModelIdentity, *, num_blocks: int) -> DraftEngine:
        """Makes an engine with the draft model.

        Args:
            facts: Of its device.
            pace: Of the same.
            identity: What it calls itself.
        """
        return DraftEngine(
            decoder=self.draft(pace),
            identity=identity,
            num_blocks=num_blocks,
            limits=facts.limits,
            clock=pace.now_s,
        )


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
        return read_tokenizer(self.folder)

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
        """What a service of this model announces, if its pages hold as much.

        Args:
            name: Name for users; empty: the folder's.
        """
        law = f"{self.profile.name} {self.mean_length}"
        return ModelIdentity(
            name=name or served_name(self.folder),
            vocab_hash=vocab_hash(self.folder),
            vocab_size=self._vocab_size,
            context_len=MOST_CONTEXT,
            eos_token_ids=self._eos_token_ids,
            weights_hash=fingerprint([law.encode()], []),
            arithmetic=SIMULATED,
        )

    @cached_property
    def _pair(self) -> SimulatedPair:
        guesses = guesses_of(self.profile, self.acceptance)
        return SimulatedPair(law=self._law, vocab_size=self._vocab_size, guesses=guesses)

    def target(self) -> SimulatedTarget:
        return self._pair.target(Pace(self.profile.target))

    def draft_engine(self, facts: DrafterFacts, identity: ModelIdentity, *, num_blocks: int) -> DraftEngine:
        """Makes an engine with the draft model, and runs its first steps; the arguments are those of the pair's."""
        engine = self._pair.draft_engine(facts, Pace(facts), identity, num_blocks=num_blocks)
        engine.warm_up()
        return engine
