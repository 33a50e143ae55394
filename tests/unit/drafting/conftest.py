"""Fixtures of the sources' tests."""

from __future__ import annotations

from tests.unit.engine.conftest import tiny

__all__ = ["tiny"]
