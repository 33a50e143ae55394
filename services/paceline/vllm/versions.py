"""The versions of vLLM that the tests ran with: the seam that a proposer hangs on is marked experimental there."""

from __future__ import annotations

from paceline.core.errors import ConfigError
from paceline.vllm.settings import SECTION

TESTED = ("0.32.0",)


def installed_version() -> str:
    """The version of the vLLM around us."""
    import vllm  # type: ignore[import-not-found]

    return str(vllm.__version__)


def check_version(version: str, untested: bool) -> None:
    """Refuses a version of vLLM that was not tested, unless the user goes on with it.

    Raises:
        ConfigError: It was not tested; names the versions, and the setting to go on.
    """
    if untested or version.partition("+")[0] in TESTED:
        return
    raise ConfigError(
        f"vLLM {version} was not tested with this release; tested: {', '.join(TESTED)}; to go on with it, set "
        f'"untested": true in the section {SECTION} of --additional-config'
    )
