"""generate() on a sharded model: the tokens of the stock model, the same on all ranks, by every way to decode."""

import pytest
import torch

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, unpatch_model
from tests.devices import local_device
from tests.distributed import run_ranks
from tests.trainer.scenario import llama

PROMPT = torch.tensor([[1, 17, 5, 40], [1, 9, 88, 23]])
LENGTH = dict(max_new_tokens=6, min_new_tokens=6)
WAYS = {
    "greedy": dict(do_sample=False),
    "beams": dict(do_sample=False, num_beams=3),
    "a static cache": dict(do_sample=False, cache_implementation="static", disable_compile=True),
    "no cache": dict(do_sample=False, use_cache=False),
    "penalised": dict(do_sample=False, repetition_penalty=1.5, no_repeat_ngram_size=2),
    "prompt lookup": dict(do_sample=False, prompt_lookup_num_tokens=2),
}


def decoded(model, device, assistant):
    model.eval()
    prompt = PROMPT.to(device)
    results = {}
    for name, options in WAYS.items():
        inputs = prompt[:1] if name == "prompt lookup" else prompt
        results[name] = model.generate(inputs, **LENGTH, **options).tolist()
    results["assisted"] = model.generate(prompt[:1], **LENGTH, do_sample=False, assistant_model=assistant).tolist()
    return results


def on_ranks(rank, world_size):
    model, assistant = llama(), llama(num_hidden_layers=1).eval()
    for whole in (model, assistant):
        patch_model(whole, ParallelConfig(tensor_parallel_size=world_size))
        whole.to(local_device())
    results = decoded(model, local_device(), assistant)
    torch.manual_seed(3 + rank)  # nobody promised equal generators
    sampled = model.generate(PROMPT.to(local_device()), **LENGTH, do_sample=True, top_k=0)
    beams = model.generate(PROMPT.to(local_device()), **LENGTH, do_sample=True, num_beams=2)
    return results, sampled.tolist(), beams.tolist()


@pytest.mark.parametrize("device", ["neuron", pytest.param("cpu", marks=pytest.mark.full)])
def test_every_way_to_decode(device):
    ranks = run_ranks(on_ranks, 2, device=device)
    expected = decoded(llama(), "cpu", llama(num_hidden_layers=1).eval())
    for results, sampled, beams in ranks:
        for name, tokens in expected.items():
            assert results[name] == tokens, name
        assert (sampled, beams) == ranks[0][1:], "ranks of one copy sample different tokens"


def in_a_pipeline(rank, world_size):
    model = llama()
    patch_model(model, ParallelConfig(pipeline_parallel_size=world_size))
    with pytest.raises(PlanError, match="2 pipeline stages, which work on whole batches and generate no text"):
        model.generate(PROMPT)
    unpatch_model(model)
    return model.eval().generate(PROMPT.to(model.device), **LENGTH, do_sample=False).tolist()


def test_a_pipeline_refuses_by_name_until_it_is_taken_back():
    expected = llama().eval().generate(PROMPT, **LENGTH, do_sample=False).tolist()
    assert run_ranks(in_a_pipeline, 2, device="cpu") == [expected] * 2
