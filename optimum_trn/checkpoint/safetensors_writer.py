"""Writes a safetensors file block by block, so that not even one whole tensor need be in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from .slices import HEADER_LENGTH

# Names of the format (https://github.com/huggingface/safetensors#format), in the order in which its own writer lays
# tensors out: wider types first, so that all stay aligned.
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsWriter:
    """A safetensors file in the making: `tensors` says what it will hold, `append` takes their bytes.

    `tensors` are descriptors of which only shape and dtype count; their data is expected in the order of `names`, in
    any number of blocks along dimension 0.  Raises OSError where the disk does, and ValueError for a dtype that the
    format does not know.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.names = file_order(tensors)
        self._header, offsets = header_of(tensors, metadata)
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        self._size = len(self._header) + max((offsets[name] + sizes[name] for name in self.names), default=0)

    def open(self) -> None:
        """Begin the file."""
        self._file: BinaryIO = open(self.path, "wb")
        self._file.write(self._header)

    def append(self, block: Tensor) -> None:
        """Write the next block, a CPU tensor."""
        self._file.write(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Put the complete file on the disk."""
        with self._file:
            assert self._file.tell() == self._size, f"{self.path} got {self._file.tell()} of {self._size} bytes"
            self._file.flush()
            os.fsync(self._file.fileno())


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file of these tensors, and where behind it each of them begins, in bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    offset = 0
    for name in file_order(tensors):
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offsets[name], offset = offset, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_LENGTH.size)
    return HEADER_LENGTH.pack(len(text)) + text, offsets


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order in which safetensors' own writer puts them: by dtype, then by name."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which the safetensors format does not know.")
    order = {dtype: index for index, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda name: (order[tensors[name].dtype], name))
