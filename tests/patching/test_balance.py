"""Where layers are cut: the slowest stage is as fast as can be, by what layers, embeddings, heads and norms cost."""

from itertools import combinations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from optimum_trn.errors import PlanError
from optimum_trn.patching import plan_for
from optimum_trn.patching.balance import balanced_ends, cost
from optimum_trn.patching.stage_plan import stage_ends

SIZES = dict(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=8)


def slowest(costs, ends, before, after):
    bounds = [0, *(end + 1 for end in ends), len(costs)]
    sums = [sum(costs[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]
    sums[0] += before
    sums[-1] += after
    return max(sums)


def test_no_other_cut_has_a_faster_slowest_stage():
    generator = torch.Generator().manual_seed(0)
    for stages in (2, 3, 4):
        costs = torch.rand(9, generator=generator).tolist()
        for before, after in ((0.0, 0.0), (1.0, 0.2), (0.1, 4.0)):
            ends = balanced_ends(costs, stages, before, after)
            best = min(slowest(costs, other, before, after) for other in combinations(range(8), stages - 1))
            assert slowest(costs, ends, before, after) == pytest.approx(best)
            assert ends == sorted(set(ends)) and len(ends) == stages - 1


def test_every_stage_has_a_layer_and_more_stages_than_layers_are_refused():
    assert balanced_ends([1.0] * 4, 4, after=100.0) == [0, 1, 2]
    with pytest.raises(PlanError, match="4 layers cannot be cut into 5 pipeline stages"):
        balanced_ends([1.0] * 4, 5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_head_counts_also_where_it_is_tied_to_a_look_up_table(tied):
    with torch.device("meta"):
        small = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=16, tie_word_embeddings=tied))
        large = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=200, tie_word_embeddings=tied))
    assert stage_ends(plan_for(small.config), small, 2)[0] == ["model.layers.3"]
    # The head costs as much as 2.5 layers.
    assert cost(large.lm_head) == pytest.approx(2.5 * cost(large.model.layers[0]), rel=0.03)
    assert stage_ends(plan_for(large.config), large, 2)[0] == ["model.layers.4"]


def test_of_experts_those_that_a_token_goes_to_count():
    with torch.device("meta"):
        config = MixtralConfig(**SIZES, vocab_size=16, num_local_experts=8, num_experts_per_tok=2)
        layer = MixtralForCausalLM(config).model.layers[0]
    experts = sum(parameter.numel() for name, parameter in layer.named_parameters() if "experts" in name)
    others = sum(parameter.numel() for name, parameter in layer.named_parameters() if "experts" not in name)
    assert cost(layer, config) == others + experts / 4
