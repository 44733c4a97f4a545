"""NeuronModelForCausalLM gives stock models: of the stock class, in one process unchanged, on the local device."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optimum_trn.errors import UnsupportedModelError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import state_of
from tests.checkpoint.stock_files import saved
from tests.devices import NEURON_FIRST, local_device
from tests.distributed import run_ranks
from tests.models.tiny import SIZES, batch


def in_one_process(rank, world_size, directory):
    """A stock twin and ours, with no parallel config, with the trivial one, and built from a config."""
    stock = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(1)
    built = AutoModelForCausalLM.from_config(stock.config)
    torch.manual_seed(1)
    for expected, model in (
        (stock, NeuronModelForCausalLM.from_pretrained(directory)),
        (stock, NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(1))),
        (built, NeuronModelForCausalLM.from_config(stock.config)),
    ):
        assert type(model) is type(expected) and state_of(model) is None
        assert model.training == expected.training
        assert "save_pretrained" not in vars(model) and not hasattr(model, "hf_device_map")
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {local_device()}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        for name, tensor in expected.named_parameters():
            assert torch.equal(model.get_parameter(name).cpu(), tensor), name
        for name, tensor in expected.named_buffers():
            assert torch.equal(model.get_buffer(name).cpu(), tensor), name
        rows = batch(expected)
        loss = model(**{name: tensor.to(local_device()) for name, tensor in rows.items()}).loss
        assert torch.allclose(loss.cpu(), expected(**rows).loss)


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_one_process_gets_the_stock_model_on_its_device(tmp_path, device):
    saved(tmp_path, tie_word_embeddings=True)
    run_ranks(in_one_process, 1, str(tmp_path), device=device)


def survives_a_copy(rank, world_size, directory):
    model = NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(world_size))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    twin.save_pretrained(directory + "/twin")
    model.save_pretrained(directory + "/model")
    return type(model) is type(AutoModelForCausalLM.from_pretrained(directory))


def test_a_deep_copy_of_a_sharded_model_saves_its_own_weights(tmp_path):
    model = saved(tmp_path)
    assert all(run_ranks(survives_a_copy, 2, str(tmp_path), device="cpu"))
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "twin")
    assert not twin.lm_head.weight.any()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model").lm_head.weight, model.lm_head.weight)


def resolved(rank, world_size, directory):
    model = NeuronModelForCausalLM.from_pretrained(
        directory, ParallelConfig(world_size), variant="fp16", subfolder="inside", attn_implementation="eager"
    )
    return model.generation_config.max_length, model.config._attn_implementation, model.config.name_or_path


def test_variant_subfolder_generation_config_and_other_arguments_are_resolved_by_transformers(tmp_path):
    model = saved(tmp_path / "inside")
    model.save_pretrained(tmp_path / "inside", variant="fp16")
    (tmp_path / "inside" / "model.safetensors").unlink()
    (tmp_path / "inside" / "generation_config.json").write_text(json.dumps({"max_length": 77}))
    for result in run_ranks(resolved, 2, str(tmp_path), device="cpu"):
        assert result == (77, "eager", str(tmp_path))


def test_pickled_weights_are_not_read_unless_asked_for(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        NeuronModelForCausalLM.from_pretrained(tmp_path)
    NeuronModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


REMOTE = """
from transformers import LlamaForCausalLM

class Remote(LlamaForCausalLM):
    pass
"""


def refuses_to_cut_remote_code(rank, world_size, directory):
    with pytest.raises(UnsupportedModelError, match="Remote is remote code"):
        NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(world_size), trust_remote_code=True)


def test_remote_code_is_not_run_unless_asked_for_and_never_cut(tmp_path):
    config = AutoConfig.for_model("llama", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["auto_map"] = {"AutoModelForCausalLM": "modeling_remote.Remote"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "modeling_remote.py").write_text(REMOTE)
    model = NeuronModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    model = NeuronModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(model).__name__ == "Remote"
    run_ranks(refuses_to_cut_remote_code, 2, str(tmp_path), device="cpu")
