"""Settings of the tier under vLLM: of a server, `--additional-config '{"paceline": {...}}'`, and of a request.

Also which versions of vLLM fit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.addresses import check_address
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.params import DRAFT_MODEL, MAX_DRAFT_TOKENS, MAX_SHOWN, SpeculationParams
from paceline.service.config import from_mapping, setting

_log = logging.getLogger(__name__)

SECTION = "paceline"
# The method of speculation by which vLLM takes us.
METHOD = "custom_class"
# Versions of vLLM that were tested: the interface of proposers is marked experimental there. And those whose sources
# have all that ours take of them, by `tests/vllm/interface.py`, but which have no build for CPUs.
TESTED, READ = ("0.32.0",), ("0.33.0",)
# Chooses vLLM's model runner: 0 for V1, 1 for V2.
V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# Names that begin so are ours among the arguments that vLLM carries for each request: `extra_args` of its
# `SamplingParams`, and `vllm_xargs` of its HTTP API, which holds numbers and texts only.
SPECULATION = "speculation"
_ENABLED, _MOST, _METHOD = (f"{SPECULATION}.{name}" for name in ("enabled", "max_draft_tokens", "method"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Our section of vLLM's additional configuration."""

    drafters: tuple[str, ...] = setting((), help="Addresses of drafters, host:port; they need no registry.")
    registry: str = setting("", help="URL of the registry that names drafters, such as redis://host:6379.")
    tls_dir: str = setting("", help="Folder with the certificate to show to drafters; empty: plain text.")
    cpus: str = setting("", help="CPUs of the helper process, such as 4-5; empty: those that vLLM does not use.")
    learned_dir: str = setting("", help="As of paceline verifier.")
    zone: str = setting("", help="As of paceline verifier.")
    metrics_address: str = setting(
        "", help="host:port at which the helper serves /metrics, of engine N at port + N; empty: nowhere."
    )
    untested: bool = setting(False, help="Go on with a version of vLLM that was not tested.")

    def __post_init__(self) -> None:
        """Checks where drafters are found.

        Raises:
            ConfigError: There are neither addresses nor a registry, or an address is malformed.
        """
        if not self.drafters and not self.registry:
            raise ConfigError(f"{SECTION}: needs drafters (a list of host:port) or a registry (a URL)")
        for address in self.drafters:
            check_address(f"{SECTION}.drafters", address)
        if self.metrics_address:
            check_address(f"{SECTION}.metrics_address", self.metrics_address)


def settings_of(additional_config: object) -> TierSettings:
    """Returns our settings from vLLM's additional configuration.

    Raises:
        ConfigError: The section is missing, or a setting is wrong; names it.
    """
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'--additional-config must hold a section {SECTION}, such as {{"{SECTION}": {{"drafters": ["host:8201"]}}}}'
        )
    return from_mapping(TierSettings, section, f"{SECTION}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperJob:
    """Everything that a helper process needs to know.

    Attributes:
        settings: Settings of the user.
        model: Folder of the target's tokenizer.
        vocab_size: The target's vocabulary size.
        max_model_len: Most tokens of a session, prompt and output.
        max_chain: Most guesses of a session in a step.
        engine: Number of vLLM's engine.
        mode_socket: Unix socket at which it gets the mode.
    """

    settings: TierSettings
    model: Path
    vocab_size: int
    max_model_len: int
    max_chain: int
    engine: int
    mode_socket: Path


def installed_version() -> str:
    """Returns the version of the vLLM that runs here."""
    import vllm  # type: ignore[import-not-found]

    return str(vllm.__version__)


def check_version(version: str, untested: bool) -> None:
    """Refuses a version of vLLM that was not tested, unless the user accepts it.

    Raises:
        ConfigError: It was not tested; names the versions, and the setting that accepts it.
    """
    release = version.partition("+")[0]
    if untested or release in TESTED:
        return
    if release in READ:
        _log.warning("vLLM %s has the interface that the drafter tier needs, but was not run with it", version)
        return
    raise ConfigError(
        f"vLLM {version} was not tested with this release; known: {', '.join(TESTED + READ)}; to go on with it, set "
        f'"untested": true in the section {SECTION} of --additional-config'
    )


def uses_tier(vllm_config: Any) -> bool:
    """Whether a vLLM was started with our proposer or a subclass; both need our section of settings."""
    speculation, settings = vllm_config.speculative_config, vllm_config.additional_config
    return (
        speculation is not None
        and speculation.method == METHOD
        and isinstance(settings, Mapping)
        and SECTION in settings
    )


def speculation_of(extra_args: Mapping[str, Any] | None) -> SpeculationParams:
    """Returns the speculation parameters among the arguments that vLLM carries for a request.

    Raises:
        InvalidRequestError: One of them is unknown, or outside its limits; names it.
    """
    named = {name: value for name, value in (extra_args or {}).items() if isinstance(name, str)}
    given = {name: value for name, value in named.items() if name.partition(".")[0] == SPECULATION}
    enabled, most, method = given.pop(_ENABLED, True), given.pop(_MOST, None), given.pop(_METHOD, "")
    if given:
        raise InvalidRequestError(
            next(iter(given))[:MAX_SHOWN], f"is not known under vLLM; known: {_ENABLED}, {_MOST}, {_METHOD}"
        )
    if enabled not in (False, True):
        raise InvalidRequestError(_ENABLED, f"must be true or false, got {enabled!r:.{MAX_SHOWN}}")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
        raise InvalidRequestError(_MOST, f"must be a whole number, got {most!r:.{MAX_SHOWN}}")
    if method not in ("", DRAFT_MODEL):
        raise InvalidRequestError(_METHOD, f"under vLLM must be {DRAFT_MODEL}, got {method!r:.{MAX_SHOWN}}")
    return SpeculationParams(enabled=bool(enabled), max_draft_tokens=most, method=method)


def extra_args_of(speculation: SpeculationParams) -> dict[str, Any] | None:
    """Returns the arguments for vLLM to carry for a request; None: it speculates as configured."""
    return {_MOST: speculation.cap} if speculation.cap < MAX_DRAFT_TOKENS else None


def most_guesses(sampling: Any) -> int:
    """Returns how many guesses a step may verify for a request; 0: none.

    vLLM's V1 runner applies `min_p` and `logit_bias` to the token after the guesses alone.

    Args:
        sampling: vLLM's `SamplingParams` of the request, which were checked when it came; None: it generates nothing.
    """
    if sampling is None or sampling.logit_bias or sampling.min_p > 0.0:
        return 0
    try:
        return speculation_of(sampling.extra_args).cap
    except InvalidRequestError:
        return 0
