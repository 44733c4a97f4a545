"""The analytic operators of a layout are those that the real, patched modules run: their FLOPs are equal."""

import math

import pytest
from transformers import AutoConfig

from optimum_trn.cost import CALIBRATION, get_machine
from optimum_trn.cost.operators import demand_of
from optimum_trn.parallel import ParallelConfig
from optimum_trn.planning import Layout, Workload, architecture_of, trace_training_step
from optimum_trn.planning.stream import Sizes, attention_core, embedding, head, layer

BATCH, LENGTH = 2, 64
SHAPES = {
    "llama": dict(hidden_size=128, intermediate_size=352, num_attention_heads=8, num_key_value_heads=4),
    "gpt_neox": dict(hidden_size=128, num_attention_heads=8, intermediate_size=512),
    "mixtral": dict(
        hidden_size=128, intermediate_size=96, num_attention_heads=8, num_key_value_heads=8, num_local_experts=4
    ),
}


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_flops_of_a_step_are_those_of_the_real_modules(model_type, tensor):
    config = AutoConfig.for_model(model_type, num_hidden_layers=3, vocab_size=4096, **SHAPES[model_type])
    parallel = ParallelConfig(tensor)
    traced = trace_training_step(config, parallel, batch_size=BATCH, sequence_length=LENGTH).flops
    work = Workload(architecture_of(config), get_machine("trn1.32xlarge"), 1, LENGTH, BATCH * 32 // tensor, "fp32")
    layout = Layout(parallel, BATCH)

    def flops(parts):
        return sum(demand_of(part, work.machine.core, CALIBRATION["trainium"]).flops for part in parts)

    core = flops(attention_core(work, Sizes.of(work, layout)))
    own = 3 * flops(layer(work, layout)) + flops(head(work, layout)) + flops(embedding(work, layout))
    # The device's fused attention computes the scores once more in its backward pass: seven products, not six.
    assert own + 3 * core / 6 == pytest.approx(traced, rel=1e-9)


def test_experts_do_the_work_of_those_that_a_token_goes_to():
    shape = architecture_of(AutoConfig.for_model("mixtral", num_hidden_layers=1, vocab_size=512, **SHAPES["mixtral"]))
    work = Workload(shape, get_machine("trn1.32xlarge"), 1, LENGTH, 64, "fp32")
    found = demand_of(layer(work, Layout(ParallelConfig(), BATCH))[0], work.machine.core, CALIBRATION["trainium"]).flops
    tokens = BATCH * LENGTH
    experts = 2 * tokens * 2 * 3 * 128 * 96  # two experts a token, three products each
    attention = 2 * tokens * 4 * 128 * 128 + 2 * 2 * BATCH * LENGTH**2 * 128
    assert found == experts + attention + 2 * tokens * 128 * 4


def test_context_parallel_ranks_share_the_queries_and_see_all_keys():
    shape = architecture_of(AutoConfig.for_model("llama", num_hidden_layers=1, vocab_size=512, **SHAPES["llama"]))
    work = Workload(shape, get_machine("trn1.32xlarge"), 1, LENGTH, 32)
    sizes = Sizes.of(work, Layout(ParallelConfig(context_parallel_size=4)))
    assert sizes.queries == sizes.tokens == math.ceil(LENGTH / 4) and sizes.keys == LENGTH
