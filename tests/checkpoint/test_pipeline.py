"""Stock files of pipelined models: a stage reads only its own, and all write together what one process would."""

import filecmp
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from optimum_trn import NeuronModelForCausalLM, ParallelConfig
from tests.distributed import run_ranks
from tests.trainer.scenario import llama

PP2 = dict(pipeline_parallel_size=2)


def load_and_save(rank, world_size, directory, degrees):
    config = ParallelConfig(**degrees)
    model = NeuronModelForCausalLM.from_pretrained(f"{directory}/stock", config)
    model.save_pretrained(f"{directory}/whole")
    model.save_pretrained(f"{directory}/shards", max_shard_size="20KB")
    torch.manual_seed(5 + rank)
    NeuronModelForCausalLM.from_config(model.config, config).save_pretrained(f"{directory}/initial")
    return [name for name, _ in model.named_parameters()]


CASES = {
    "pp2": (2, PP2),
    "pp2 interleaved": (2, {**PP2, "pipeline_schedule": "interleaved_1f1b"}),
    "tp2 x pp2": (4, {**PP2, "tensor_parallel_size": 2}),
}
FULL = [pytest.param(name, tied, marks=pytest.mark.full) for name in CASES for tied in (False, True) if name != "pp2"]


@pytest.mark.parametrize(("name", "tied"), [("pp2", True), ("pp2", False), *FULL])
def test_files_are_those_of_one_process_to_the_byte(tmp_path, name, tied):
    world_size, degrees = CASES[name]
    llama(tie_word_embeddings=tied, num_hidden_layers=4).save_pretrained(tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    stock.save_pretrained(tmp_path / "stock-shards", max_shard_size="20KB")
    ranks = run_ranks(load_and_save, world_size, str(tmp_path), degrees)
    for ours, theirs in (("whole", "stock"), ("shards", "stock-shards")):
        files = sorted(os.listdir(tmp_path / theirs))
        assert sorted(os.listdir(tmp_path / ours)) == files
        assert filecmp.cmpfiles(tmp_path / ours, tmp_path / theirs, files, shallow=False)[0] == files
    torch.manual_seed(5)
    initial = AutoModelForCausalLM.from_config(stock.config).state_dict()
    for key, weight in load_file(tmp_path / "initial" / "model.safetensors").items():
        assert torch.equal(weight, initial[key]), key
    layers = [{key.split(".")[2] for key in names if ".layers." in key} for names in ranks]
    assert layers[0].isdisjoint(layers[-1])
    assert "model.embed_tokens.weight" in ranks[0] and "model.embed_tokens.weight" not in ranks[-1]
    assert "lm_head.weight" in ranks[-1] and "lm_head.weight" not in ranks[0]
