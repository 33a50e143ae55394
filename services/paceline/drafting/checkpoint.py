"""The checkpoint of a drafter: a model of its own, or an EAGLE-3 head on its target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoints.families import is_eagle3
from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import head_identity, load_eagle3
from paceline.engine.identity import model_identity
from paceline.engine.loading import load_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """A folder to draft from.

    Args:
        folder: Of the draft model or the head.
        target: Of the target, which a head needs.
        name: Shown in the registry; empty: the folder's.
        dtype: As in `load_decoder`.
        device: As in `load_decoder`.
    """

    folder: Path
    target: Path | None = None
    name: str = ""
    dtype: str = "auto"
    device: str = "auto"

    def identity(self) -> ModelIdentity:
        """What a drafter of it announces.

        Raises:
            ConfigError: A folder is missing, or is no checkpoint that can be served.
        """
        if not is_eagle3(self.folder):
            return model_identity(self.folder, self.name, self.dtype, device=self.device)
        return head_identity(self.folder, self._target(), self.name, self.dtype)

    def load(self, num_threads: int) -> Decoder:
        """Loads it.

        Raises:
            ConfigError: As `identity`, or a setting that does not fit the machine.
        """
        if not is_eagle3(self.folder):
            return load_decoder(self.folder, self.dtype, self.device, num_threads)
        return load_eagle3(self.folder, self._target(), self.dtype, self.device, num_threads)

    def _target(self) -> Path:
        if self.target is None:
            raise ConfigError(f"--target-model: the EAGLE-3 head {self.folder} needs the folder of its target")
        return self.target
