"""What serves a target model inside a verifier, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.acceptance_rules import Rules
from paceline.core.messages import ModelIdentity
from paceline.engine.grammar import Grammars
from paceline.service.learned import FORGOTTEN, LearnedFile
from paceline.verifier.verifier_host import TargetStepper


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine to be, and what a verifier promises with it.

    Attributes:
        identity: Of the model as it is served.
        own_drafter: What names a drafter inside the engine; empty: the verifier pairs sessions with drafters.
        rules: Acceptance rules that are served.
        grammars: Compiles the grammars of requests; None: none are served.
        make: Loads the model; called in the engine thread.
        learned: Where it keeps what it learns.
    """

    identity: ModelIdentity
    own_drafter: str = ""
    rules: Rules
    grammars: Grammars | None = None
    make: Callable[[], TargetStepper]
    learned: LearnedFile = FORGOTTEN
