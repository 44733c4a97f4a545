"""Checkpoints whose tensors are merged or split on the way into the model, such as one tensor for each expert."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from optimum_trn.checkpoint.lazy import OPERATIONS
from optimum_trn.checkpoint.reload import load_weights
from optimum_trn.checkpoint.slices import Stored
from optimum_trn.errors import UnsupportedModelError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from tests.checkpoint.stock_files import differences, saved, whole_tensors
from tests.distributed import run_ranks
from tests.models.families import SIZES_OF
from tests.models.tiny import SIZES

MIXTURES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"]


def load_and_save_all(rank, world_size, directory):
    results = {}
    for model_type in MIXTURES:
        model = NeuronModelForCausalLM.from_pretrained(f"{directory}/{model_type}", ParallelConfig(world_size))
        results[model_type] = whole_tensors(model)
        model.save_pretrained(f"{directory}/{model_type}-ours", max_shard_size="60KB")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_weights(model, f"{directory}/{model_type}-ours")
        assert not differences(whole_tensors(model), results[model_type])
    return results


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_experts_are_merged_slice_by_slice_and_saved_one_by_one_as_transformers_does(size, tmp_path):
    """Three ranks divide neither the intermediate width of the experts nor the heads."""
    for model_type in MIXTURES:
        model = saved(tmp_path / model_type, model_type, **(SIZES_OF.get(model_type) or SIZES))
        with safe_open(tmp_path / model_type / "model.safetensors", "pt") as file:
            assert any(".experts.1." in name for name in file.keys())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / model_type)
        model.save_pretrained(tmp_path / f"{model_type}-stock", max_shard_size="60KB")
    results = run_ranks(load_and_save_all, size, str(tmp_path), device="cpu")
    for model_type in MIXTURES:
        expected = whole_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / model_type))
        for tensors in results:
            assert differences(tensors[model_type], expected) == [], model_type
        stock, ours = tmp_path / f"{model_type}-stock", tmp_path / f"{model_type}-ours"
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in stock.iterdir())
        for path in stock.iterdir():
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
        names = json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"]
        assert any(".experts.1." in name for name in names)


class Recorded:
    """A source that counts what is read of it."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.read = tensor, tensor.shape, 0

    def __getitem__(self, index):
        self.read += self.tensor[index].numel()
        return self.tensor[index]


def test_every_operation_on_lazy_tensors_is_that_on_real_ones_and_reads_nothing_else():
    generator = torch.Generator().manual_seed(0)
    real = [torch.randn(5, 6, generator=generator) for _ in range(4)]
    recorded = [Recorded(tensor) for tensor in real]

    def converted(tensors):
        merged = torch.stack(tensors[:2], dim=0), torch.stack(tensors[2:], dim=0)
        joined = torch.transpose(torch.cat(merged, dim=1), dim0=1, dim1=2)
        first, second = torch.split(joined, [2, 4], dim=1)
        return [*torch.chunk(first, 3, dim=-1), *(part.squeeze(0).contiguous() for part in torch.chunk(second, 2))]

    lazy = converted([Stored(source) for source in recorded])
    expected = converted(real)
    assert sum(source.read for source in recorded) == 0
    for mine, theirs in zip(lazy, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.size(0) == theirs.shape[0]
        before = sum(source.read for source in recorded)
        assert torch.equal(mine[1:2], theirs[1:2])
        assert sum(source.read for source in recorded) - before == theirs[1:2].numel()
        assert torch.equal(mine[...], theirs)
    assert {function.__name__ for function in OPERATIONS} == {"stack", "cat", "split", "chunk", "transpose"}


def test_what_computes_with_weights_is_refused_by_name():
    lazy = Stored(torch.ones(4, 2))
    for name, compute in {"mul": lambda: torch.mul(lazy, 2), "reshape": lambda: lazy.reshape(8)}.items():
        with pytest.raises(UnsupportedModelError, match=rf"transformers computes \({name}\) with the weights"):
            compute()
