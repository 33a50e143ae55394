"""numba's decorator for kernels, with what it compiles kept in a folder for each state of all their sources.

numba asks only whether a kernel's own file has changed; but kernels call those of other files, and after a change there
they would go on as they were. And it asks where that file lies, so that each checkout would compile the same once more.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numba
from numba import njit
from numba.core import caching

from paceline.user_cache import NothingWritableError, user_cache, writable

__all__ = ["ARITHMETIC", "FOREST", "PACKAGE", "cache_folder", "kept_with", "njit", "sources_hash", "take_shipped"]

# What compiled code is made of.
PACKAGE = Path(__file__).parent
# Where an image brings kernels that were compiled when it was built.
SHIPPED = PACKAGE / "compiled"
_CPU = "engine/backends/cpu"
# What decides the bits of logits and samples.
ARITHMETIC = (
    "core/noise.py",
    f"{_CPU}/attention.py",
    f"{_CPU}/bfloat16_product.py",
    f"{_CPU}/fused_layers.py",
    f"{_CPU}/kv.py",
    f"{_CPU}/layer_kernels.py",
    f"{_CPU}/noise_kernels.py",
    f"{_CPU}/openmp.py",
    f"{_CPU}/row_kernels.py",
    f"{_CPU}/simd.py",
    "kernel_cache.py",
)
# Of the draft trees.
FOREST = (
    "forest/calibrating.py",
    "forest/choosing.py",
    "forest/committing.py",
    "forest/drafting.py",
    "forest/growing.py",
    "forest/kernel.py",
    "forest/linking.py",
    "forest/records.py",
    "kernel_cache.py",
)


def sources_hash(package: Path, sources: Sequence[str]) -> str:
    """Names the state of sources of kernels below a folder: equal ones compute equal bits."""
    digest = hashlib.sha256()
    for name in sources:
        digest.update((package / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder(environ: Mapping[str, str], package: Path, sources: Sequence[str]) -> Path:
    """Where kernels compiled from these sources are kept: below NUMBA_CACHE_DIR, or in the user's cache.

    Args:
        environ: Environment variables.
        package: Folder that the sources lie in.
        sources: Their names in it.

    Raises:
        NothingWritableError: See `user_cache`.
    """
    named = environ.get("NUMBA_CACHE_DIR")
    folder = writable(Path(named), "NUMBA_CACHE_DIR") if named else user_cache(environ)
    return folder / f"kernels-{sources_hash(package, sources)}"


def take_shipped(shipped: Path, folder: Path) -> None:
    """Fills an empty cache with kernels of the same sources that came with the package; numba writes to its cache.

    Args:
        shipped: Holds a folder of the cache's name, or nothing.
        folder: See `cache_folder`.
    """
    source = shipped / folder.name
    if folder.exists() or not source.is_dir():
        return
    # Whole or not at all: of two processes that start at once, the second keeps what the first has put there.
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as copy:
            shutil.copytree(source, Path(copy) / folder.name).rename(folder)


# Before any kernel is decorated: the decorator looks up its folder once.
try:
    _FOLDERS: dict[tuple[str, ...], Path] = {
        sources: cache_folder(os.environ, PACKAGE, sources) for sources in (ARITHMETIC, FOREST)
    }
except NothingWritableError as error:
    raise SystemExit(f"paceline: error: {error}") from None
for _folder in _FOLDERS.values():
    take_shipped(SHIPPED, _folder)
numba.config.CACHE_DIR = str(_FOLDERS[ARITHMETIC])


# Older ones keep kernels by the whole path.
if hasattr(caching, "UserProvidedCacheLocator"):

    class KernelPlace(caching.UserProvidedCacheLocator):  # type: ignore[misc]
        """Where a kernel is kept: by its place in the package, wherever that lies."""

        @classmethod
        def get_suitable_cache_subpath(cls, file: str) -> str:
            """Names the folder of a file's kernels."""
            return "_".join(Path(file).parent.relative_to(PACKAGE).parts)

        def get_source_stamp(self) -> str:
            """Returns the same for every file: the folder is named after what all of them hold."""
            return ""

        @classmethod
        def from_function(cls, function: Callable[..., object], file: str) -> KernelPlace | None:
            """Returns none for a function of another package."""
            place: KernelPlace | None = None
            if Path(file).is_relative_to(PACKAGE):
                place = super().from_function(function, file)
            return place

    numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.KernelPlace,UserProvidedCacheLocator,IPythonCacheLocator"


@contextmanager
def kept_with(sources: tuple[str, ...]) -> Iterator[None]:
    """What is decorated in a block is kept in the folder of these sources."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_FOLDERS[sources])
    yield
    numba.config.CACHE_DIR = before
