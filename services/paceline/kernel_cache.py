"""Compiles kernels and keeps them on disk, in a folder for each state of all their sources.

numba's own cache asks only whether a kernel's own file has changed; but kernels call those of other files, and after a
change there they would go on as they were. It asks where that file lies, so that each checkout would compile the same
once more. And it numbers what it keeps in an index that two processes may write at once: then one finds the code that
the other compiled for arguments of other types, and computes something else.

The cache saves time and nothing else: where it cannot be written, kernels are compiled anew by each process.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import logging
import os
import pickle
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching, compiler, config, serialize

from paceline.user_cache import PRIVATE, NothingWritableError, is_private, make_private, user_cache, writable

logger = logging.getLogger(__name__)

# What comes of reading a file that was cut off, as by a power failure.
_DAMAGED = (EOFError, pickle.UnpicklingError, ValueError, TypeError, AttributeError, ImportError, IndexError)

# Settings of numba that decide what code it makes.
_FLAGS = (
    "BOUNDSCHECK",
    "CPU_FEATURES",
    "CPU_NAME",
    "DEBUG_ARRAY_OPT",
    "DEBUGINFO_DEFAULT",
    "ENABLE_AVX",
    "ENABLE_PROFILING",
    "EXTEND_VARIABLE_LIFETIMES",
    "LLVM_REFPRUNE_PASS",
    "LOOP_VECTORIZE",
    "OPT",
    "SLP_VECTORIZE",
    "THREADING_LAYER",
    "USING_SVML",
)

# Longest that a process waits for kernels that others compile, all together, and how often it looks: a whole set takes
# two minutes on slow cores.
_patience_s, _LOOK_S = [180.0], 0.05

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# What compiled code is made of.
PACKAGE = Path(__file__).parent
# Where an image brings kernels that were compiled when it was built.
SHIPPED = PACKAGE / "compiled"
_CPU = "engine/backends/cpu"
# What decides the bits of logits and samples.
ARITHMETIC = (
    "core/noise.py",
    "core/processors.py",
    f"{_CPU}/attention.py",
    f"{_CPU}/fused_layers.py",
    f"{_CPU}/kv.py",
    f"{_CPU}/layer_kernels.py",
    f"{_CPU}/noise_kernels.py",
    f"{_CPU}/openmp.py",
    f"{_CPU}/product.py",
    f"{_CPU}/row_kernels.py",
    f"{_CPU}/simd.py",
    f"{_CPU}/step_kernels.py",
    "engine/layers.py",
    "kernel_cache.py",
)
# Of the draft trees, and of what they are in a step.
FOREST = (
    "core/pages.py",
    "engine/packing.py",
    "forest/drafting.py",
    "forest/linking.py",
    "forest/records.py",
    "forest/tree_loops.py",
    "kernel_cache.py",
)


def sources_hash(package: Path, sources: Sequence[str]) -> str:
    """Names the state of sources of kernels below a folder: equal ones compute equal bits."""
    digest = hashlib.sha256()
    for name in sources:
        digest.update((package / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder(environ: Mapping[str, str], package: Path, sources: Sequence[str]) -> Path | None:
    """Where kernels compiled from these sources are kept: below NUMBA_CACHE_DIR, or in the user's cache.

    Args:
        package: Folder that the sources lie in.
        sources: Their names in it.

    Returns:
        The folder, which nobody else may write, or None: there is no place for one.
    """
    named, name = environ.get("NUMBA_CACHE_DIR"), f"kernels-{sources_hash(package, sources)}"
    variable = "NUMBA_CACHE_DIR" if named else "XDG_CACHE_HOME"
    try:
        folder = writable(Path(named), variable) if named else user_cache(environ)
        found = writable(folder / name, variable)
        return found if found.name == name else found / name
    except NothingWritableError as error:
        logger.warning("kernels are compiled at each start: %s", error)
        return None


def take_shipped(shipped: Path, folder: Path) -> None:
    """Fills an empty cache with kernels of the same sources that came with the package, which may not be writable.

    Args:
        shipped: Holds a folder of the cache's name, or nothing.
        folder: See `cache_folder`.
    """
    source = shipped / folder.name
    # Whole or not at all: of two processes that start at once, the second keeps what the first has put there. What
    # cannot be read or written is compiled anew.
    with suppress(OSError):
        if folder.exists() or not source.is_dir():
            return
        make_private(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as copy:
            copied = shutil.copytree(source, Path(copy) / folder.name)
            # An image may give its folders to a group.
            copied.chmod(PRIVATE)
            copied.rename(folder)


# Before any kernel is decorated: the decorator looks up its folder once.
_FOLDERS: dict[tuple[str, ...], Path | None] = {
    sources: cache_folder(os.environ, PACKAGE, sources) for sources in (ARITHMETIC, FOREST)
}
for _folder in _FOLDERS.values():
    if _folder is not None:
        take_shipped(SHIPPED, _folder)


class KernelCache(caching.NullCache):  # type: ignore[misc]
    """A kernel's compiled code: a file for each signature, named after it, so that any number of processes may write.

    Args:
        function: Lies in the package; the kernel as it is written.
        folder: See `cache_folder`.
    """

    def __init__(self, function: Callable[..., Any], folder: Path):
        code = function.__code__
        place = "_".join(Path(code.co_filename).with_suffix("").relative_to(PACKAGE).parts)
        self._claims: dict[Path, int | None] = {}
        self._stem = folder / f"{place}.{function.__name__}-{code.co_firstlineno}"

    def load_overload(self, sig: object, target_context: Any) -> Any:
        """Returns what was compiled for a signature on a processor like this one, or none.

        Where another process is compiling it, that is waited for: two services that start side by side share the work.
        """
        target_context.refresh()
        key = self._key(sig, target_context.codegen())
        path = self._path(key)
        found = _load(path, key)
        if found is None:
            self._let_go(path)
            self._claims[path] = _claim(path)
            found = _load(path, key)
        if found is None:
            _tell_once()
            return None
        self._let_go(path)
        return compiler.CompileResult._rebuild(target_context, *found)  # noqa: SLF001 - as numba keeps it

    def _let_go(self, path: Path) -> None:
        claim = self._claims.pop(path, None)
        if claim is not None:
            with suppress(OSError):
                _claim_of(path).unlink()
            os.close(claim)

    def save_overload(self, sig: object, cres: Any) -> None:
        """Keeps what was compiled for a signature, whole or not at all: it is in memory, and works without."""
        key = self._key(sig, cres.codegen)
        path = self._path(key)
        if cres.library.has_dynamic_globals:
            # Addresses of this very process.
            self._let_go(path)
            return
        written = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            make_private(path.parent)
            try:
                written.write_bytes(serialize.dumps((key, cres._reduce())))  # noqa: SLF001 - as numba keeps it
                written.replace(path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            _complain(path.parent, error.strerror or repr(error))
        finally:
            self._let_go(path)

    @staticmethod
    def _key(sig: object, codegen: Any) -> tuple[object, ...]:
        flags = tuple(f"{flag}={getattr(config, flag, None)}" for flag in _FLAGS)
        return sig, codegen.magic_tuple(), flags, numba.__version__, sys.version_info[:2]

    def _path(self, key: tuple[object, ...]) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{hashlib.sha256(str(key).encode()).hexdigest()[:16]}")


@functools.cache
def _tell_once() -> None:
    logger.info("compiles kernels, once for this version on this machine")


def _load(path: Path, key: object) -> Any:
    """What was compiled for a key, as numba keeps it; None: nothing that can be used."""
    try:
        kept, payload = pickle.loads(_read(path))
    except (OSError, *_DAMAGED):
        return None
    return payload if kept == key else None


def _claim_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.claim")


def _claim(path: Path) -> int | None:
    """Waits until no other process compiles a kernel, and says that this one does for as long as the result is open.

    Only for so long: one that hangs, or cannot keep what it compiled, costs others time and nothing else.
    """
    try:
        make_private(path.parent)
        claim = os.open(_claim_of(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, PRIVATE)
    except OSError:
        return None
    while _patience_s[0] > 0.0:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return claim
        except BlockingIOError:
            time.sleep(_LOOK_S)
            _patience_s[0] -= _LOOK_S
        except OSError:
            # A file system without locks.
            break
    return claim


def _read(path: Path) -> bytes:
    """The content of a file, which is run as it is found.

    Raises:
        OSError: There is none, or somebody else may have written it.
    """
    if not is_private(path.parent.stat()):
        raise PermissionError(errno.EPERM, "others may write there", str(path.parent))
    return path.read_bytes()


@functools.cache
def _complain(folder: Path, reason: str) -> None:
    logger.warning("kernels cannot be kept, each process compiles them anew", extra={"in": folder, "reason": reason})


def compiled(function: FunctionT, sources: tuple[str, ...], **options: Any) -> FunctionT:
    """Compiles a loop on its first call, to run without the GIL unless `options` say else.

    With NUMBA_DISABLE_JIT=1 it runs as Python.

    Args:
        function: Lies in the package.
        sources: Whose compiled code is kept together.
        options: Of numba's decorator.
    """
    dispatcher = numba.njit(**{"nogil": True, **options})(function)
    folder = _FOLDERS[sources]
    if dispatcher is not function and folder is not None:
        dispatcher._cache = KernelCache(function, folder)  # noqa: SLF001 - there is no other way
    return cast(FunctionT, dispatcher)


def kernel(function: FunctionT) -> FunctionT:
    """Compiles a loop of `ARITHMETIC`: IEEE arithmetic as written, division by zero as numpy has it."""
    return compiled(function, ARITHMETIC, error_model="numpy")


def expanded(function: FunctionT) -> FunctionT:
    """Writes a few lines out where compiled code calls them.

    numba optimises all that a function calls once more with that function: a level less is seconds less of compiling.
    """
    return compiled(function, ARITHMETIC, error_model="numpy", inline="always")


def inlined(function: FunctionT) -> FunctionT:
    """Compiles a step of a loop into the loop, which LLVM vectorises only then."""
    return compiled(function, ARITHMETIC, error_model="numpy", forceinline=True)
