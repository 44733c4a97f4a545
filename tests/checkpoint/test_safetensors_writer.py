"""The streaming writer makes the files that safetensors' own writer makes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimum_trn.checkpoint.safetensors_writer import SafetensorsWriter, file_order


def test_a_file_written_in_blocks_is_byte_equal_to_one_written_at_once(tmp_path):
    tensors = {
        "ünicode": torch.randn(5, 3),
        "b": torch.randn(4, dtype=torch.bfloat16),
        "a": torch.randn(7, 2),
        "half": torch.randn(3).half(),
        "count": torch.tensor(4),
        "mask": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "double": torch.randn(2, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    writer = SafetensorsWriter(str(tmp_path / "ours"), tensors, {"format": "pt"})
    writer.open()
    for name in file_order(tensors):
        for block in tensors[name].split(2) if tensors[name].dim() else [tensors[name]]:
            writer.append(block)
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "ours").items())


def test_a_dtype_that_the_format_lacks_is_named_before_a_byte_is_written(tmp_path):
    with pytest.raises(ValueError, match="w is torch.complex128"):
        SafetensorsWriter(str(tmp_path / "ours"), {"w": torch.zeros(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())
