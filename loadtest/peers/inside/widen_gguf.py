"""Copies a GGUF file with its quantised tensors as 16-bit floats: `python widen_gguf.py FILE OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

KEPT = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
# The writer sets them itself.
OWN = ("general.architecture", "general.file_type", "general.quantization_version")


def widen(file: Path, out: Path) -> None:
    """Writes the copy."""
    reader = gguf.GGUFReader(file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.") and name not in OWN}
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, field in fields.items():
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.tensor_type not in KEPT:
            data = gguf.dequantize(data, tensor.tensor_type).astype(np.float16)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    widen(*map(Path, sys.argv[1:]))
