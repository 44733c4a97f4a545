"""torch.compile(backend="neuron"): the same numbers as eager, static shapes, the core's random numbers."""

import pytest
import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_backend_is_known_by_name():
    assert "neuron" in torch._dynamo.list_backends()


def test_a_compiled_training_step_equals_eager():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to("neuron")
        step = torch.compile(model, backend="neuron", dynamic=False) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(0, 64, (2, 16)).to("neuron")
        losses = []
        for _ in range(3):
            loss = step(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.device.type == "neuron"
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert torch._dynamo.utils.counters["aot_autograd"]["ok"] > 0, "it was compiled, not run by the fallback"


def test_outputs_live_in_the_cores_memory_and_inputs_may_be_written():
    @torch.compile(backend="neuron", dynamic=False)
    def work(x, counter):
        counter.add_(1)
        return x * 2 + counter, x

    x, counter = torch.ones(1024, device="neuron"), torch.zeros(1, device="neuron")
    work(x, counter)
    before = torch.neuron.memory_allocated()
    out, same = work(x, counter)
    assert torch.neuron.memory_allocated() - before >= 4096
    assert counter.item() == 2 and out[0].item() == 4.0 and same.data_ptr() == x.data_ptr()


def test_dropout_draws_from_the_cores_generator():
    dropout = torch.compile(nn.Dropout(0.5), backend="neuron", dynamic=False)
    x = torch.ones(256, device="neuron")
    dropout(x)
    host = torch.get_rng_state()
    state = torch.neuron.get_rng_state()
    first, second = dropout(x).cpu(), dropout(x).cpu()
    torch.neuron.set_rng_state(state)
    assert torch.equal(dropout(x).cpu(), first) and not torch.equal(first, second)
    assert torch.equal(host, torch.get_rng_state()), "the CPU's generator is left alone"


def test_symbolic_shapes_run_uncompiled_and_say_so(caplog):
    double = torch.compile(lambda x: x * 2, backend="neuron", dynamic=True)
    assert double(torch.ones(5, device="neuron")).cpu().tolist() == [2.0] * 5
    assert "Pass dynamic=False" in caplog.text


def test_modes_are_refused():
    with pytest.raises(Exception, match="one mode and no options; leave out mode='max-autotune'"):
        torch.compile(lambda x: x * 2, backend="neuron", mode="max-autotune")(torch.ones(5, device="neuron"))
