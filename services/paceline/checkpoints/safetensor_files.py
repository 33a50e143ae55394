"""Safetensors files: counts of parameters, and files written one tensor at a time, which their library does not do."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.service.config import reason

WEIGHTS_FILE: Final = "model.safetensors"
# Cells of the types that are written here: a bfloat16 is the upper half of a float32.
CELLS: Final[Mapping[str, np.dtype[Any]]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<u4")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Type (a key of `CELLS`) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * CELLS[self.dtype].itemsize


def num_parameters(path: Path) -> int:
    """Returns how many numbers the weight files of a folder hold.

    Raises:
        ConfigError: A weight file is broken.
    """
    # A base install and a gateway have no such library.
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            said = reason(error, file)
            raise ConfigError(f"{file} cannot be read as safetensors: {said}; fetch or copy it again") from error
    return total


def write_tensors(file: Path, shapes: Mapping[str, TensorShape], tensors: Iterable[npt.NDArray[Any]]) -> None:
    """Writes a file; of the tensors, only the current one is in memory.

    Args:
        shapes: By tensor name, in order.
        tensors: Cells of each tensor, in the same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in shapes.items():
        begin, end = end, end + each.num_bytes
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": (begin, end)}
    described = json.dumps(header).encode()
    # Numbers begin at a multiple of eight bytes.
    described += b" " * (-len(described) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(described)) + described)
        for cells in tensors:
            stream.write(np.ascontiguousarray(cells).data)


def as_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds finite numbers to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint32] = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)
