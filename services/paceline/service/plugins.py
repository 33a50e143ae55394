"""Draft methods and acceptance rules by name: ours, and those that other packages declare as entry points.

A package declares a maker under `paceline.sources` or `paceline.rules` in its metadata; the name of the entry point is
the name of the method or rule. Names of ours cannot be overridden. Makers are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.params import ACCEPTANCE_RULES, GRAMMAR, LAYER_SKIP, MEDUSA, NGRAM, SUFFIX


class Registry:
    """Makers by name.

    Args:
        group: Of entry points.
        ours: Makers in this package, written as entry points: `module:attribute`.
        always: Names that need no maker; errors list them, too.
    """

    def __init__(self, group: str, ours: Mapping[str, str], always: Sequence[str] = ()) -> None:
        self._group = group
        self._always = always
        self._ours = {name: EntryPoint(name, value, group) for name, value in ours.items()}

    def __contains__(self, name: str) -> bool:
        return bool(self._entries(name))

    @property
    def names(self) -> tuple[str, ...]:
        """All names on this machine, ours first."""
        return tuple(dict.fromkeys((*self._ours, *sorted(entry_points(group=self._group).names))))

    def make(self, name: str, *args: Any, **options: Any) -> Any:
        """Makes the source or rule of this name.

        Raises:
            ConfigError: The name is unknown or ambiguous, the maker cannot be imported, or it refuses the options.
        """
        entries = self._entries(name)
        if len(entries) != 1:
            known = ", ".join((*self._always, *self.names))
            why = f"{len(entries)} packages declare it" if entries else f"there are {known}"
            raise ConfigError(f"{self._group}: {name!r} is not known here; {why}")
        (entry,) = entries
        try:
            maker: Callable[..., Any] = entry.load()
            made = maker(*args, **options)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self._group}: {name!r} cannot be made by {entry.value}: {error}") from error
        if made.name != name:
            raise ConfigError(
                f"{self._group}: {name!r} is what {entry.value} is declared as, and it says {made.name!r}"
            )
        return made

    def _entries(self, name: str) -> list[EntryPoint]:
        if name in self._ours:
            return [self._ours[name]]
        # A package may be on the path twice.
        return list({entry.value: entry for entry in entry_points(group=self._group, name=name)}.values())


_OURS = "paceline.verifier.make_sources"
# Sources of guesses inside the verifier, the cheapest first; a maker takes `make_sources.SourceSetup`.
SOURCES = Registry(
    "paceline.sources",
    {
        NGRAM: f"{_OURS}:text",
        SUFFIX: f"{_OURS}:text",
        GRAMMAR: f"{_OURS}:grammar",
        MEDUSA: f"{_OURS}:medusa",
        LAYER_SKIP: f"{_OURS}:early_exit",
    },
)
# Rules besides those that are always served; a maker takes the options by name, and makes a rule
# (`paceline.core.acceptance_rules.Rule`).
RULES = Registry("paceline.rules", {}, ACCEPTANCE_RULES)
