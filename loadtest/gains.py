"""What speculation is expected to bring, in closed form: tokens of a step, speed-up, and the best gamma.

With an acceptance rate that is the same at every position, a chain of gamma draft tokens commits

    E = 1 + a + a^2 + ... + a^gamma = (1 - a^(gamma + 1)) / (1 - a)

tokens a step (Leviathan et al. 2211.17192, equation 1). The last, recovered or bonus token is counted in it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import ConfigError

MAX_GAMMA = 64


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens that a step with a chain of `gamma` draft tokens commits, the one after them included.

    Args:
        acceptance: Probability that a draft token matches when all before it did, 0 to 1.
        gamma: Draft tokens, 0 or more.

    Raises:
        ConfigError: An argument is outside its limits.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise ConfigError(f"acceptance must be from 0 to 1, got {acceptance!r}")
    if gamma < 0:
        raise ConfigError(f"gamma must be 0 or more, got {gamma}")
    if acceptance == 1.0:
        return gamma + 1.0
    return (1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance)


def speed_up(acceptance: float, gamma: int, cost_ratio: float) -> float:
    """Speed over plain decoding when every draft token is waited for and verifying costs no more than one token.

    (2211.17192, theorem 3.8.)

    Args:
        acceptance: As in `expected_tokens`.
        gamma: As in `expected_tokens`.
        cost_ratio: Time of a draft step over that of a target step; 0 where drafting is hidden behind verifying.

    Raises:
        ConfigError: An argument is outside its limits.
    """
    if cost_ratio < 0.0:
        raise ConfigError(f"cost_ratio must be 0 or more, got {cost_ratio!r}")
    return expected_tokens(acceptance, gamma) / (1.0 + gamma * cost_ratio)


def goodput(acceptance: float, gamma: int, num_sessions: int, step_s: Callable[[int], float]) -> float:
    """Tokens/s of `num_sessions` sessions that verify `gamma` draft tokens each, drafting hidden.

    Args:
        acceptance: As in `expected_tokens`.
        gamma: As in `expected_tokens`.
        num_sessions: Sessions in a step.
        step_s: Seconds of a step by its rows, such as `StepCost.at`.

    Raises:
        ConfigError: An argument is outside its limits.
    """
    return num_sessions * expected_tokens(acceptance, gamma) / step_s(num_sessions * (1 + gamma))


def best_gamma(worth: Callable[[int], float], *, most: int = MAX_GAMMA) -> int:
    """The gamma from 0 to `most` at which `worth` is highest, the smallest of equals."""
    return max(range(most + 1), key=lambda gamma: (worth(gamma), -gamma))
