"""Error types of the whole product; status codes of HTTP and gRPC are given to them at the edges only."""

from __future__ import annotations

# Values are quoted at the end of a problem, and a client may send one of megabytes.
MAX_PROBLEM_CHARS = 240


class PacelineError(Exception):
    """Base of all errors that a user may see."""


class InvalidRequestError(PacelineError):
    """A request field holds what it must not hold; the message says the limit and what came."""

    def __init__(self, field: str, problem: str) -> None:
        problem = shortened(problem, MAX_PROBLEM_CHARS)
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelNotFoundError(PacelineError):
    """The model asked for is not served here."""


class OverloadedError(PacelineError):
    """Admission refused for now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(PacelineError):
    """A peer that the request needs cannot be reached."""


class PeerLostError(UnavailableError):
    """The connection to a peer broke off: it died, or the way to it did."""


class MovedError(UnavailableError):
    """A session leaves its verifier since its gateway wants it so."""


class EngineDiedError(UnavailableError):
    """An engine died in a step that computed the session; others may do so too."""


class EndsEnginesError(PacelineError):
    """The request has ended one engine after another, and is not run again."""


class ResumeMismatchError(PacelineError):
    """The tokens that a client has are not those of its session: nothing is joined to them."""


class StaleEpochError(PacelineError):
    """Another owner runs the session under a newer epoch; who gets this stops, and nothing is lost."""


class SessionNotFoundError(PacelineError):
    """No record of the session is there: it never was, or it is older than records live."""


class UnauthenticatedError(PacelineError):
    """The caller did not say who it is in a way that is believed."""


class PermissionDeniedError(PacelineError):
    """The caller is known, but this call is for others."""


class ConfigError(PacelineError):
    """A setting, a checkpoint or the environment makes starting impossible; says what to do next."""


class LocalProtocolError(PacelineError):
    """Our own code broke the session protocol: a bug here."""


class RemoteProtocolError(PacelineError):
    """A peer broke the session protocol; its stream ends, nothing else."""


def shortened(text: str, max_chars: int) -> str:
    """Returns a text of at most so many characters; dots stand for what was cut off its end."""
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
