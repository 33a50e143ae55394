"""Where a verifier with our engine keeps what it has learned."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.messages import ModelIdentity
from paceline.service.learned import LearnedFile, kept_in
from paceline.verifier.config import VerifierConfig


def learned_file(config: VerifierConfig, identity: ModelIdentity, environ: Mapping[str, str]) -> LearnedFile:
    """The file of such a verifier on this machine.

    Args:
        config: Its settings; `learned_dir` names the folder.
        identity: Its model.
        environ: See `kept_in`.
    """
    flags = (config.dtype, config.device, config.threads, config.cpus, config.spare_cpus)
    return kept_in(config.learned_dir, environ, identity.weights_hash, config.speculative_config, *flags)
