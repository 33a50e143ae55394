"""A pair of simulated models: made of a profile, a tokenizer and a few distributions for `--engine simulated`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
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
from paceline.service.config import named
from paceline.simulated.device import Pace, SimulatedDraft, SimulatedTarget
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.profile import DeviceFacts, DrafterFacts, Profile, read_profile
from paceline.simulated.roofline import computed_profile
from paceline.simulated.text import Ints, words_of

logger = logging.getLogger(__name__)

# Longest session; pages may hold less.
MOST_CONTEXT = 131_072


def find_profile(name: str) -> Profile:
    """Returns the profile of a file, or the one of a name such as `70b+1b@4xh100+h100`.

    Raises:
        ConfigError: There is no such file, and the name is in another form; or the file is wrong.
    """
    path = Path(name)
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


def draft_engine(
    draft: SimulatedDraft, facts: DrafterFacts, pace: Pace, identity: ModelIdentity, *, num_blocks: int
) -> DraftEngine:
    """A drafter's engine on a device of these facts, at this pace."""
    return DraftEngine(decoder=draft, identity=identity, num_blocks=num_blocks, limits=facts.limits, clock=pace.now_s)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Facts that verifier and drafter share.

    Attributes:
        profile: Facts of the devices.
        folder: With the tokenizer whose words texts are made of; no weights are read.
    """

    profile: Profile
    folder: Path

    @classmethod
    def of(cls, profile: str, folder: Path, acceptance: float | None) -> Simulation:
        """The simulation that a service's settings describe; the log says that it is one.

        Args:
            acceptance: Chance that a first guess is right; None: by the profile's distribution.

        Raises:
            ConfigError: There is no such profile; names the flag.
        """
        with named("--profile", profile):
            found = find_profile(profile)
        logger.warning("nothing is computed: devices are simulated", extra={"profile": found.name})
        if acceptance is not None:
            found = replace(found, acceptance=GuessLaw.at(acceptance))
        return cls(profile=found, folder=folder)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder)

    @property
    def _vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _words(self) -> Ints:
        return words_of(self._tokenizer)

    def identity(self, name: str) -> ModelIdentity:
        """The identity that a service of this model announces, if its pages hold as much.

        Args:
            name: Name for users; empty: the folder's.
        """
        config = self.folder / "config.json"
        ends = read_object(config).get("eos_token_id") if config.is_file() else None
        return ModelIdentity(
            name=name or served_name(self.folder),
            vocab_hash=vocab_hash(self.folder),
            vocab_size=self._vocab_size,
            context_len=MOST_CONTEXT,
            eos_token_ids=eos_token_ids(self.folder, ends, self._vocab_size),
            weights_hash=fingerprint([self.profile.name.encode()], []),
            arithmetic=SIMULATED,
        )

    def target(self) -> SimulatedTarget:
        return SimulatedTarget(self._words, Pace(self.profile.target), self._vocab_size)

    def draft(self, pace: Pace) -> SimulatedDraft:
        return SimulatedDraft(self._words, pace, self._vocab_size, self.profile.acceptance)

    def draft_engine(self, facts: DrafterFacts, identity: ModelIdentity, *, num_blocks: int) -> DraftEngine:
        """Makes an engine with the draft model on a device, and runs its first steps."""
        pace = Pace(facts)
        engine = draft_engine(self.draft(pace), facts, pace, identity, num_blocks=num_blocks)
        engine.warm_up()
        return engine
