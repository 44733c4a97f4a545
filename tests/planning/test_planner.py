"""A plan says what fits, what it costs, and how it compares; its arithmetic is that of the list prices."""

import pytest
from transformers import AutoConfig

from optimum_trn.errors import PlanError
from optimum_trn.planning.planner import compare, plan

SMALL = AutoConfig.for_model(
    "llama", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1376, vocab_size=32000
)
ARGUMENTS = dict(instance="trn1.2xlarge", nodes=1, sequence_length=512, global_batch=32)


def test_days_and_dollars_are_tokens_over_speed_and_price():
    found = plan(SMALL, **ARGUMENTS, tokens=1e9, dollars_per_hour=2.0)
    hours = 1e9 / found.chosen.step.tokens_per_second / 3600
    assert found.hours(found.chosen) == pytest.approx(hours)
    assert found.dollars(found.chosen) == pytest.approx(2 * hours)
    assert found.dollars_per_billion_tokens(found.chosen) == pytest.approx(2 * hours)
    assert found.as_dict()["chosen"]["days"] == pytest.approx(hours / 24)


def test_equal_speed_saves_what_the_prices_say():
    found = plan(SMALL, **{**ARGUMENTS, "instance": "trn1.32xlarge"}, compare_with="p4d.24xlarge", keep=1)
    ratios = compare(found)
    assert ratios["saving_at_equal_speed"] == pytest.approx(0.344, abs=5e-4)  # 1 - 21.50 / 32.77
    assert 1 - ratios["price_ratio"] / 1.246 == pytest.approx(0.473, abs=5e-4)  # 24.6 % faster
    assert ratios["saving"] == pytest.approx(1 - ratios["price_ratio"] / ratios["speed_ratio"])


def test_a_wanted_layout_is_kept_to_and_its_distance_is_named():
    found = plan(SMALL, **ARGUMENTS, layout={"tp": 2, "dp": 1, "mb": 1})
    assert found.chosen.layout.parallel.tensor_parallel_size == 2 and found.chosen.layout.micro_batch == 1
    entry = found.as_dict()["chosen"]
    assert entry["slower_than_best"] > 0 and entry["because_of"] in entry["parts_seconds"]


def test_a_layout_that_does_not_exist_is_refused():
    with pytest.raises(PlanError, match="no valid layout of 2 ranks"):
        plan(SMALL, **ARGUMENTS, layout={"tp": 2, "dp": 2})
    with pytest.raises(PlanError, match="'xp' is none of tp"):
        plan(SMALL, **ARGUMENTS, layout={"xp": 2})


def test_a_model_that_fits_nowhere_says_what_takes_the_memory():
    large = AutoConfig.for_model("llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64)
    with pytest.raises(PlanError, match=r"No layout of .*B parameters fits 1 x trn1.2xlarge.*does not fit: most of it"):
        plan(large, **{**ARGUMENTS, "global_batch": 2})
