"""from_pretrained and from_config give the stock model's tensors, cut, at every layout."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from optimum_trn.modeling import NeuronModel, NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import state_of
from tests.checkpoint.stock_files import differences, saved, whole_tensors
from tests.devices import NEURON_FIRST
from tests.distributed import run_ranks
from tests.models.families import tiny_config
from tests.models.tiny import SIZES

LAYOUTS = [(2, 2), (4, 4), (4, 2)]  # world size, tensor-parallel size


SEED = 5


def load(directory, size, kwargs, seed=SEED):
    """What one rank gets: the whole tensors, the loading info, the generator's next number, and more."""
    torch.manual_seed(seed)
    model, info = NeuronModelForCausalLM.from_pretrained(
        directory, ParallelConfig(size), output_loading_info=True, **kwargs
    )
    draw = torch.rand(1).item()
    assert state_of(model).config.tensor_parallel_size == size
    local = sum(parameter.numel() for parameter in model.parameters())
    return whole_tensors(model), info, draw, local, type(model).__name__, model.training


def load_all(rank, world_size, size, cases):
    return [load(directory, size, kwargs) for directory, kwargs in cases]


def stock(directory, kwargs, seed=SEED):
    torch.manual_seed(seed)
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **kwargs)
    return model, info, torch.rand(1).item()


def assert_loads_as_stock(world_size, size, device, *cases):
    """Each case is a directory and keyword arguments; one job of the ranks loads them all."""
    cases = [(str(directory), kwargs) for directory, kwargs in cases]
    for results in run_ranks(load_all, world_size, size, cases, device=device):
        for (directory, kwargs), (tensors, info, draw, local, name, training) in zip(cases, results, strict=True):
            model, expected_info, expected_draw = stock(directory, kwargs)
            assert differences(tensors, whole_tensors(model)) == [], directory
            assert info == expected_info, directory
            assert draw == expected_draw, directory
            assert name == type(model).__name__
            assert training is False
            assert local < (0.55 if size == 2 else 0.3) * sum(parameter.numel() for parameter in model.parameters())


def edit(directory, change):
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def drop_some(tensors):
    for name in list(tensors):
        if "layers.1.self_attn" in name or "layers.0.mlp.down" in name or "embed" in name or "norm" in name:
            del tensors[name]
    tensors["another"] = torch.zeros(3)


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("world_size, size", LAYOUTS)
def test_tensors_reports_and_generator_are_those_of_transformers_at_every_layout(tmp_path, world_size, size, device):
    saved(tmp_path / "llama")
    saved(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    saved(tmp_path / "biases", "qwen2")
    saved(tmp_path / "several-files", "mistral", max_shard_size="30KB")
    assert len(list((tmp_path / "several-files").glob("*.safetensors"))) > 2
    saved(tmp_path / "missing-weights")
    edit(tmp_path / "missing-weights", drop_some)
    assert_loads_as_stock(
        world_size,
        size,
        device,
        (tmp_path / "llama", {}),
        (tmp_path / "tied", {}),
        (tmp_path / "biases", {}),
        (tmp_path / "several-files", {"dtype": torch.bfloat16}),
        (tmp_path / "missing-weights", {}),
        (tmp_path / "missing-weights", {"dtype": "bfloat16"}),
    )


def test_names_dtypes_and_shapes_that_need_resolving_are_resolved_as_in_transformers(tmp_path):
    config = dict(SIZES, dtype=torch.bfloat16)
    for name, tied in (("base model", False), ("tied base model", True)):
        base = AutoModel.from_config(AutoConfig.for_model("llama", **config, tie_word_embeddings=tied))
        base.save_pretrained(tmp_path / name)
    saved(tmp_path / "other shape")
    # As large as one shard, so that comparing shards with it would find nothing wrong.
    edit(tmp_path / "other shape", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(52, 40)}))
    pickled = saved(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(pickled.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    assert_loads_as_stock(
        2,
        2,
        "cpu",
        (tmp_path / "base model", {}),  # the head is missing, the names lack a prefix, the dtype is the config's
        (tmp_path / "tied base model", {}),
        (tmp_path / "other shape", {"ignore_mismatched_sizes": True}),
        (tmp_path / "pickled", {"use_safetensors": False}),
    )
    _, info, _ = stock(tmp_path / "base model", {})
    assert info["missing_keys"] == {"lm_head.weight"}


def test_a_tied_weight_that_is_stored_twice_is_tied_only_if_all_of_it_is_equal(tmp_path):
    for name, changed in (("equal", slice(0, 0)), ("different", slice(None)), ("different on one rank", slice(90, 91))):
        saved(tmp_path / name, tie_word_embeddings=True)

        def store_twice(tensors, changed=changed):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors["lm_head.weight"][changed] += 1

        edit(tmp_path / name, store_twice)
        model, *_ = stock(tmp_path / name, {})
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "equal")
    cases = [(tmp_path / name, {}) for name in ("equal", "different", "different on one rank")]
    assert_loads_as_stock(2, 2, "cpu", *cases)


def load_with_other_seeds(rank, world_size, directory):
    result = load(directory, 2, {}, seed=SEED + rank)
    torch.manual_seed(SEED + rank)
    return result[0], result[2], torch.rand(1).item()


def test_ranks_with_other_seeds_still_draw_the_same_weights_and_keep_their_own_stream(tmp_path):
    saved(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    model, _, draw = stock(tmp_path, {})
    (first, first_draw, _), (second, second_draw, undisturbed) = run_ranks(
        load_with_other_seeds, 2, str(tmp_path), device="cpu"
    )
    assert differences(first, whole_tensors(model)) == differences(second, whole_tensors(model)) == []
    assert first_draw == draw
    assert second_draw == undisturbed


def without_matrices(rank, world_size, directory, config):
    """A ViT from its config, and from a checkpoint that lacks most matrices."""
    torch.manual_seed(SEED)
    built = whole_tensors(NeuronModel.from_config(config, ParallelConfig(world_size)))
    torch.manual_seed(SEED)
    return built, whole_tensors(NeuronModel.from_pretrained(directory, ParallelConfig(world_size)))


def test_what_a_truncated_normal_draws_is_drawn_as_in_one_process(tmp_path):
    config = tiny_config("vit", "base")
    model = AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if tensors[name].dim() > 1])
    torch.manual_seed(SEED)
    expected = [whole_tensors(AutoModel.from_config(config))]
    torch.manual_seed(SEED)
    expected.append(whole_tensors(AutoModel.from_pretrained(tmp_path)))
    for results in run_ranks(without_matrices, 2, str(tmp_path), config, device="cpu"):
        for actual, theirs in zip(results, expected, strict=True):
            assert differences(actual, theirs) == []


BUILDS = [("llama", True, torch.float32), ("qwen3", False, torch.float32), ("qwen2", True, torch.bfloat16)]


def build_all(rank, world_size, size):
    return [
        build(*case, lambda config: NeuronModelForCausalLM.from_config(config, ParallelConfig(size))) for case in BUILDS
    ]


def build(model_type, tied, dtype, from_config):
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied, dtype=dtype)
    model = from_config(config)
    return whole_tensors(model), torch.rand(1).item(), model.training


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("world_size, size", LAYOUTS)
def test_from_config_draws_the_weights_of_one_process_at_every_layout(world_size, size, device):
    for results in run_ranks(build_all, world_size, size, device=device):
        for case, (tensors, draw, training) in zip(BUILDS, results, strict=True):
            expected, expected_draw, _ = build(*case, AutoModelForCausalLM.from_config)
            assert differences(tensors, expected) == [], case
            assert draw == expected_draw
            assert training
