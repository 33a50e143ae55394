"""Error types of the whole product; status codes of HTTP and gRPC are given to them at the edges only."""

from __future__ import annotations

# Values are quoted at the end of a problem, and a client may send one of megabytes.
MAX_PROBLEM_CHARS = 240


class PacelineError(Exception):
    """Base of all errors that a user may see."""


class InvalidRequestError(PacelineError):
    """A request field is outside its limits; the message names the limit and the value."""

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


class PeerSilentError(PeerLostError):
    """A peer has sent nothing for too long: its process or host is frozen, or the way to it is cut. No engine died."""


class MovedError(UnavailableError):
    """A session has to be placed anew, on any verifier; nobody is at fault."""


class EngineDiedError(UnavailableError):
    """An engine died in a step that computed the session; others may do so too."""


class EndsEnginesError(PacelineError):
    """The request has ended one engine after another, and is not run again."""


class ResumeMismatchError(PacelineError):
    """The tokens that a client has are not those of its session, which therefore cannot go on from them."""


class StaleEpochError(PacelineError):
    """Another owner runs the session under a newer epoch; the caller stops, and nothing is lost."""


class SessionNotFoundError(PacelineError):
    """There is no record of the session: it never existed, or its record has expired."""


class UnauthenticatedError(PacelineError):
    """The caller has not proved who it is."""


class PermissionDeniedError(PacelineError):
    """The caller is known, but this call is for others."""


class ConfigError(PacelineError):
    """A setting, a checkpoint or the environment makes starting impossible; the message names what to do next."""


class LocalProtocolError(PacelineError):
    """Our own code broke the session protocol: a bug here."""


class RemoteProtocolError(PacelineError):
    """A peer broke the session protocol; its stream ends, nothing else."""


def shortened(text: str, max_chars: int) -> str:
    """Returns a text of at most `max_chars` characters; dots stand for what was cut off its end."""
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
