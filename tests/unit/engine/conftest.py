"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.tiny_models import FAMILIES, TinyModel, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the checkpoint of a family once a session."""
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            made[family] = save_tiny(tmp_path_factory.mktemp(family), family, FAMILIES[family])
        return made[family]

    return make
