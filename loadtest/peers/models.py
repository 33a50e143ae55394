"""Converts a checkpoint to a peer's format, once, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from loadtest.peers.environments import child_environ, locked, nicely, peers_folder
from loadtest.peers.processes import run_command

CONVERT_S = 600.0
TO_GGUF = Path(__file__).parent / "inside" / "to_gguf.py"


def converted(
    checkpoint: Path, model_format: str, python: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> Path:
    """Returns a folder with the checkpoint as a peer wants it.

    Args:
        checkpoint: Hugging Face checkpoint folder.
        model_format: `hf` (as it is), `openvino` (IR, bf16 weights) or `gguf` (`model.gguf` in it, bf16).
        python: of the environment whose libraries convert.
        environ: names the cache folder.
        say: is told when something is made.

    Raises:
        CommandFailedError: It cannot be converted.
    """
    if model_format == "hf":
        return checkpoint
    out = peers_folder(environ) / "models" / f"{checkpoint.name}-{_digest(checkpoint)}-{model_format}"
    with locked(out):
        if not out.is_dir():
            say(f"converting {checkpoint.name} to {model_format}, once: {out}")
            partial = out.with_name(f"{out.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            command = _command(checkpoint, model_format, python, partial)
            run_command(nicely(command), env=child_environ(environ), quiet_s=CONVERT_S)
            os.replace(partial, out)
    return out


def _command(checkpoint: Path, model_format: str, python: Path, out: Path) -> list[str | Path]:
    if model_format == "gguf":
        return [python, TO_GGUF, checkpoint, out / "model.gguf"]
    optimum = python.with_name("optimum-cli")
    return [python, optimum, "export", "openvino", "-m", checkpoint, "--task", "text-generation-with-past", out]


def _digest(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in {".json", ".safetensors"}:
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
