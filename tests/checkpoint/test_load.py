"""from_pretrained and from_config give the stock model's tensors, cut, at every layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import state_of
from tests.checkpoint.stock_files import DEVICES, differences, saved, whole_tensors
from tests.distributed import run_ranks
from tests.models.tiny import SIZES

LAYOUTS = [(2, 2), (4, 4), (4, 2)]  # world size, tensor-parallel size


def load(rank, world_size, size, directory, seed=5, **kwargs):
    """The whole tensors of a sharded load, what it says of itself, and the generator's next number."""
    torch.manual_seed(seed)
    model, info = NeuronModelForCausalLM.from_pretrained(
        directory, ParallelConfig(size), output_loading_info=True, **kwargs
    )
    assert state_of(model).config.tensor_parallel_size == size
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    local = sum(parameter.numel() for parameter in model.parameters())
    return whole_tensors(model), info, torch.rand(1).item(), local, type(model).__name__, model.training


def stock(directory, seed=5, auto_class=AutoModelForCausalLM, **kwargs):
    torch.manual_seed(seed)
    model, info = auto_class.from_pretrained(directory, output_loading_info=True, **kwargs)
    return model, info, torch.rand(1).item()


def assert_loads_as_stock(directory, world_size, size, device, **kwargs):
    model, expected_info, draw = stock(directory, **kwargs)
    for tensors, info, next_draw, local, name, training in run_ranks(
        load, world_size, size, str(directory), device=device, **kwargs
    ):
        assert differences(tensors, whole_tensors(model)) == []
        assert info == expected_info
        assert next_draw == draw
        assert name == type(model).__name__
        assert training is False
        assert local < 0.55 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size, size", LAYOUTS)
@pytest.mark.parametrize("model_type, tied", [("llama", False), ("qwen3", True), ("qwen2", False)])
def test_a_checkpoint_loads_as_in_transformers_at_every_layout(tmp_path, model_type, tied, world_size, size, device):
    saved(tmp_path, model_type, tie_word_embeddings=tied)
    assert_loads_as_stock(tmp_path, world_size, size, device)


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_over_several_files_and_another_dtype(tmp_path, device):
    saved(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_loads_as_stock(tmp_path, 2, 2, device, dtype=torch.bfloat16)


@pytest.mark.parametrize("tied", [False, True])
def test_the_dtype_of_the_config_is_the_default_and_a_base_models_checkpoint_gets_a_prefix_and_a_head(tmp_path, tied):
    config = AutoConfig.for_model("llama", **SIZES, dtype=torch.bfloat16, tie_word_embeddings=tied)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    assert_loads_as_stock(tmp_path, 2, 2, "cpu")
    tensors, info, *_ = run_ranks(load, 2, 2, str(tmp_path), device="cpu")[0]
    assert tensors["lm_head.weight"].dtype is torch.bfloat16
    assert info["missing_keys"] == (set() if tied else {"lm_head.weight"})


def edit(directory, change):
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size, size", LAYOUTS)
def test_missing_weights_are_those_of_one_process_at_every_layout(tmp_path, world_size, size, device):
    saved(tmp_path)

    def drop(tensors):
        for name in list(tensors):
            if "layers.1.self_attn" in name or "layers.0.mlp.down" in name or "embed" in name or "norm" in name:
                del tensors[name]
        tensors["another"] = torch.zeros(3)

    edit(tmp_path, drop)
    assert_loads_as_stock(tmp_path, world_size, size, device)


def test_a_weight_of_another_shape_is_drawn_anew_if_that_is_asked_for(tmp_path):
    saved(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(52, 40)}))  # as large as one shard
    assert_loads_as_stock(tmp_path, 2, 2, "cpu", ignore_mismatched_sizes=True)


@pytest.mark.parametrize("equal", [True, False, "on the first rank"])
def test_a_tied_weight_that_is_stored_twice_is_tied_only_if_all_of_it_is_equal(tmp_path, equal):
    saved(tmp_path, tie_word_embeddings=True)

    def store_twice(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[{True: 0, False: slice(None), "on the first rank": 90}[equal]] += 0 if equal is True else 1
        tensors["lm_head.weight"] = head

    edit(tmp_path, store_twice)
    model, *_ = stock(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (equal is True)
    for result in run_ranks(load, 2, 2, str(tmp_path), device="cpu"):
        assert differences(result[0], whole_tensors(model)) == []


def load_with_other_seeds(rank, world_size, directory):
    result = load(rank, world_size, 2, directory, seed=5 + rank)
    torch.manual_seed(5 + rank)
    return result[0], result[2], torch.rand(1).item()


def test_ranks_with_other_seeds_still_draw_the_same_weights_and_keep_their_own_stream(tmp_path):
    saved(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    model, _, draw = stock(tmp_path)
    (first, first_draw, _), (second, second_draw, undisturbed) = run_ranks(
        load_with_other_seeds, 2, str(tmp_path), device="cpu"
    )
    assert differences(first, whole_tensors(model)) == differences(second, whole_tensors(model)) == []
    assert first_draw == draw
    assert second_draw == undisturbed


def build(rank, world_size, size, model_type, **overrides):
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **SIZES, **overrides)
    model = NeuronModelForCausalLM.from_config(config, ParallelConfig(size))
    return whole_tensors(model), torch.rand(1).item(), model.training


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size, size", LAYOUTS)
@pytest.mark.parametrize("model_type, tied", [("llama", True), ("qwen3", False)])
def test_from_config_draws_the_weights_of_one_process_at_every_layout(model_type, tied, world_size, size, device):
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    draw = torch.rand(1).item()
    for tensors, next_draw, training in run_ranks(
        build, world_size, size, model_type, tie_word_embeddings=tied, device=device
    ):
        assert differences(tensors, whole_tensors(model)) == []
        assert next_draw == draw
        assert training


def test_pickled_weights_are_read_only_if_asked_for(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        NeuronModelForCausalLM.from_pretrained(tmp_path)
    assert_loads_as_stock(tmp_path, 2, 2, "cpu", use_safetensors=False)


def test_generation_config_and_variant_are_resolved_by_transformers(tmp_path):
    model = saved(tmp_path)
    model.save_pretrained(tmp_path, variant="fp16")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_length": 77}))
    loaded = NeuronModelForCausalLM.from_pretrained(tmp_path, variant="fp16")
    assert loaded.generation_config.max_length == 77
    assert type(loaded) is type(model)
