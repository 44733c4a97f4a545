"""Models that run while their weights arrive: they compute what from_pretrained computes, and the first layer first."""

import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from optimum_trn import NeuronModel, NeuronModelForCausalLM, ParallelConfig
from optimum_trn.errors import MissingError, StoreError
from optimum_trn.pool import Pool, put_directory, stream_model
from optimum_trn.pool.fetch import Fetch
from optimum_trn.pool.grouping import Stages
from tests.distributed import run_ranks

from .pools import a_pool
from .test_client import vanish

MANY_GROUPS = Stages(1e6, 1e6)  # links so slow that each layer is a group of its own


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def gpt2():
    torch.manual_seed(0)
    return randomised(GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=4, n_head=4)))


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return randomised(LlamaForCausalLM(config))


def bert():
    torch.manual_seed(0)
    return randomised(BertModel(BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))


IDS = torch.arange(24).reshape(2, 12) % 96


@pytest.fixture
def pool():
    with a_pool() as pool:
        yield pool


@pytest.mark.parametrize(
    "build, model_class",
    [(gpt2, NeuronModelForCausalLM), (llama, NeuronModelForCausalLM), (bert, NeuronModel)],
    ids=["gpt2", "llama", "bert"],
)
def test_logits_are_those_of_from_pretrained_to_the_bit(pool, tmp_path, build, model_class):
    build().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    expected = model_class.from_pretrained(tmp_path / "m").eval()
    streamed = stream_model("m", model_class, pool=pool, stages=MANY_GROUPS)
    device = next(expected.parameters()).device
    with torch.no_grad():
        assert torch.equal(streamed.model(IDS.to(device))[0], expected(IDS.to(device))[0])
    assert len(streamed.groups) > 3
    for (name, ours), theirs in zip(streamed.model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert streamed.arrived == streamed.total
    assert not streamed.model._forward_pre_hooks and not streamed.model._forward_hooks


def test_the_first_layers_run_before_the_last_have_come(pool, tmp_path, monkeypatch):
    """No clock: what follows the first three groups is held back until the first block has run."""
    gpt2().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    ran = threading.Event()
    held = threading.Event()

    class HeldFetch(Fetch):
        def _finish(self, parts):
            if parts[0].group >= 3:  # after the embeddings and the first block
                held.set()
                assert ran.wait(60)
            super()._finish(parts)

    monkeypatch.setattr("optimum_trn.pool.streaming.Fetch", HeldFetch)
    streamed = stream_model("m", pool=pool, stages=MANY_GROUPS)
    seen = []

    def after(module, args, output):
        assert held.wait(60)
        seen.append(sum(streamed.is_ready(number) for number in range(len(streamed.groups))))
        ran.set()

    streamed.model.transformer.h[0].register_forward_hook(after)
    with torch.no_grad():
        streamed.model(IDS.to(streamed.model.device))
    assert seen[0] <= 3 < len(streamed.groups)


class ReadsAnother(torch.nn.Module):
    """Computes with a weight of a module that it never calls."""

    def __init__(self, other):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.other = [other]  # hidden from the module tree, in which it stands elsewhere

    def forward(self, hidden):
        return hidden @ self.other[0].weight.T


def test_a_forward_that_reads_weights_of_a_module_that_it_does_not_call_is_run_again(pool, tmp_path):
    llama().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    expected = NeuronModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    streamed = stream_model("m", pool=pool, stages=MANY_GROUPS, start=False)
    streamed.model.lm_head.forward = None  # whoever calls it, fails
    head, device = streamed.model.lm_head, streamed.model.device
    streamed.model.lm_head = ReadsAnother(head).to(device)
    with torch.no_grad():
        assert torch.equal(streamed.model(IDS.to(device))[0], expected(IDS.to(device))[0])


def test_prefetch_brings_the_weights_to_the_host_and_start_to_the_device(pool, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    streamed = stream_model("m", pool=pool, start=False).prefetch()
    streamed._fetch.join()
    assert streamed.arrived == streamed.total and not streamed.is_ready(0)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    streamed.start().wait()
    for ours, theirs in zip(streamed.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_a_store_that_is_lost_while_a_model_streams_is_made_up_for(pool, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m", replicas=2)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    streamed = stream_model("m", pool=pool, stages=MANY_GROUPS)
    vanish(pool.servers[1])  # at whatever moment
    streamed.wait()
    for ours, theirs in zip(streamed.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_what_cannot_be_had_is_raised_where_the_model_waits(pool, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    broken = stream_model("m", pool=pool, stages=MANY_GROUPS, start=False).prefetch()
    broken._fetch.join()
    broken._fail(StoreError("planted"))
    with pytest.raises(StoreError, match="did not arrive: planted"), torch.no_grad():
        broken.model(IDS.to(broken.model.device))
    with pytest.raises(MissingError, match="no model other"):
        stream_model("other", pool=pool)


def test_from_pretrained_takes_a_url_of_the_pool(pool, tmp_path, monkeypatch):
    gpt2().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    pool.address.save(tmp_path / "pool.json")
    monkeypatch.setenv("OPTIMUM_TRN_POOL", str(tmp_path / "pool.json"))
    model = NeuronModelForCausalLM.from_pretrained("pool://m")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def tensor_parallel(rank, world_size, address, directory):
    config = ParallelConfig(tensor_parallel_size=world_size)
    expected = NeuronModelForCausalLM.from_pretrained(directory, config).eval()
    with Pool(address, timeout=30) as pool:
        streamed = stream_model("m", parallel_config=config, pool=pool, stages=MANY_GROUPS)
        device = streamed.model.device
        with torch.no_grad():
            same = torch.equal(streamed.model(IDS.to(device))[0], expected(IDS.to(device))[0])
        for ours, theirs in zip(streamed.model.parameters(), expected.parameters(), strict=True):
            same &= torch.equal(ours, theirs)
        return same, streamed.arrived, streamed.total


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_tensor_parallel_shards_stream_to_the_bit_and_ranks_fetch_no_whole_model(pool, tmp_path, build):
    build().save_pretrained(tmp_path / "m")
    put_directory(pool, tmp_path / "m", "m")
    size = pool.manifest("m/model.safetensors").size
    for same, arrived, total in run_ranks(tensor_parallel, 2, pool.address, str(tmp_path / "m")):
        assert same and arrived == total < 0.9 * size
