"""Settings of all tests: these machines are shared, so no test is judged by its time."""

from __future__ import annotations

import os

from hypothesis import settings

# What one test's verifiers learn is nothing to those of another.
os.environ["PACELINE_LEARNED_DIR"] = "none"
settings.register_profile("paceline", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("paceline")
