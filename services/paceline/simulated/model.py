"""A pair of simulated models: made of a profile, a tokenizer and a few distributions for `--engine simulated`."""

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
from paceline.simulated.device import Pace, SimulatedDraft, SimulatedTarget
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.profile import DeviceFacts, DrafterFacts, Profile, read_profile
from paceline.simulated.roofline import computed_profile
from paceline.simulated.text import TextLaw, words_of

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
        mean_length: Mean length of a text in tokens; 0: only `max_tokens` ends it.
        acceptance: Chance that a first guess is right; None: by the profile's distribution.
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
        """The identity that a service of this model announces, if its pages hold as much.

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

    def target(self) -> SimulatedTarget:
        return SimulatedTarget(self._law, Pace(self.profile.target), self._vocab_size)

    def draft(self, pace: Pace) -> SimulatedDraft:
        truth = self.profile.acceptance if self.acceptance is None else GuessLaw.at(self.acceptance)
        return SimulatedDraft(self._law, pace, self._vocab_size, truth)

    def draft_engine(self, facts: DrafterFacts, identity: ModelIdentity, *, num_blocks: int) -> DraftEngine:
        """Makes an engine with the draft model on a device, and runs its first steps."""
        pace = Pace(facts)
        engine = draft_engine(self.draft(pace), facts, pace, identity, num_blocks=num_blocks)
        engine.warm_up()
        return engine
