"""Fingerprints of weight files; needs nothing but the standard library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Of each weight file so many pieces of so many bytes are hashed: other weights of the same shape differ everywhere.
NUM_SAMPLES = 1024
SAMPLE_BYTES = 4096
HASH_CHARS = 32


def fingerprint(told: Iterable[bytes], weight_files: Iterable[Path]) -> str:
    """Returns a hash of what decides a model's logits beside its weights, and of these, sampled."""
    digest = hashlib.sha256()
    for each in told:
        digest.update(each)
    for path in weight_files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        stride = max(SAMPLE_BYTES, size // NUM_SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:HASH_CHARS]
