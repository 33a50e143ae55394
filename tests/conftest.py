"""Settings of all tests: these machines are shared, so no test is judged by its time."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("paceline", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("paceline")
