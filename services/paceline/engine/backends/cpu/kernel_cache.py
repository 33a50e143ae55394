"""numba's decorator for kernels, with what it compiles kept in a folder for each state of all their sources.

numba asks only whether a kernel's own file has changed; but kernels call those of other files, and after a change there
they would go on as they were.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numba
from numba import njit

__all__ = ["PACKAGE", "SOURCES", "cache_folder", "njit", "sources_hash"]

# What compiled code is made of.
PACKAGE = Path(__file__).parents[3]
_CPU = "engine/backends/cpu"
SOURCES = (
    "core/noise.py",
    f"{_CPU}/attention.py",
    f"{_CPU}/bfloat16_product.py",
    f"{_CPU}/fused_layers.py",
    f"{_CPU}/kernel_cache.py",
    f"{_CPU}/kv.py",
    f"{_CPU}/layer_kernels.py",
    f"{_CPU}/noise_kernels.py",
    f"{_CPU}/openmp.py",
    f"{_CPU}/row_kernels.py",
    f"{_CPU}/simd.py",
)


def sources_hash(package: Path) -> str:
    """Names the state of all sources of kernels below a folder: equal ones compute equal bits."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((package / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder(environ: Mapping[str, str], package: Path) -> Path:
    """Where kernels compiled from these sources are kept: below NUMBA_CACHE_DIR, beside them, or in the user's cache.

    Args:
        environ: Environment variables.
        package: Folder that the sources lie in.
    """
    if environ.get("NUMBA_CACHE_DIR"):
        base = Path(environ["NUMBA_CACHE_DIR"])
    elif os.access(package / "engine", os.W_OK):
        base = package / "engine" / "__pycache__"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    return base / f"kernels-{sources_hash(package)}"


# Before any kernel is decorated: the decorator looks up its folder once.
numba.config.CACHE_DIR = str(cache_folder(os.environ, PACKAGE))
