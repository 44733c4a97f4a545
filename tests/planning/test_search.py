"""The pruned search chooses what exhaustive search does, among layouts that the trainer accepts."""

import random

import pytest
from transformers import AutoConfig

from benchmarks.published import ROWS, parse, read
from optimum_trn.cost import get_machine
from optimum_trn.planning import Layout, Workload, architecture_of, estimate_memory, estimate_step
from optimum_trn.planning.search import deciding_term, layouts, search, training_arguments
from optimum_trn.trainer.arguments import NeuronTrainingArguments


def random_problem(seed):
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 8])
    shape = dict(
        hidden_size=heads * draw.choice([64, 128]),
        num_hidden_layers=draw.choice([2, 4, 6]),
        num_attention_heads=heads,
        vocab_size=draw.choice([1000, 32000]),
    )
    model_type = draw.choice(["llama", "gpt_neox", "bert", "mixtral"])
    if model_type in ("llama", "mixtral"):
        shape["num_key_value_heads"] = draw.choice([1, 2, heads])
    if model_type == "mixtral":
        shape["num_local_experts"] = 4
    return Workload(
        architecture_of(AutoConfig.for_model(model_type, **shape)),
        get_machine(draw.choice(["trn1.2xlarge", "trn1.2xlarge", "p4d.24xlarge"])),
        nodes=draw.choice([1, 2]),
        sequence_length=draw.choice([128, 512, 2048]),
        global_batch=draw.choice([8, 16]),
        precision=draw.choice(["autocast", "bf16_sr", "fp32"]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_exhaustive_search(seed):
    work = random_problem(seed)
    every = list(layouts(work))
    fast, slow = (search(work, keep=3, exhaustive=way) for way in (False, True))
    assert [c.step.seconds for c in fast.best] == [c.step.seconds for c in slow.best]
    assert [c.layout for c in fast.best] == [c.layout for c in slow.best]
    fitting = [layout for layout in every if estimate_memory(work, layout).fits]
    assert len(fitting) == slow.priced
    if fitting:
        assert slow.best[0].step.seconds == min(estimate_step(work, layout).seconds for layout in fitting)
    assert fast.tried == slow.tried == len(every)
    assert sum(fast.reasons.values()) == len(every) - len(fast.best), "each of the others has a reason"


def test_layouts_are_valid_and_each_there_once():
    work = random_problem(3)
    every = list(layouts(work))
    assert len(every) == len(set(every))
    for layout in every:
        micro_batches = layout.micro_batches(work)
        assert layout.data_parallel_size(work) * layout.micro_batch * micro_batches == work.global_batch


@pytest.mark.parametrize("row, nodes", [("N1", 16), ("N4", 32)])
def test_the_published_layout_is_feasible_and_close_to_the_chosen_one(row, nodes):
    published = next(parse(entry) for entry in read(ROWS)["rows"] if entry["id"] == row)
    work, layout = published.workload, published.layout
    assert work.nodes == nodes and layout in set(layouts(work)) and estimate_memory(work, layout).fits
    best = search(work, keep=1).best[0]
    step = estimate_step(work, layout)
    assert step.seconds <= 1.15 * best.step.seconds
    assert deciding_term(step, best.step) in step.parts


def test_the_arguments_to_paste_are_those_of_the_trainer():
    work = random_problem(0)
    names = NeuronTrainingArguments.__dataclass_fields__
    for candidate in search(work, keep=5).best:
        assert set(training_arguments(work, candidate.layout)) <= set(names)


def test_what_a_trainer_refuses_is_not_among_the_layouts():
    work = random_problem(0)
    for layout in layouts(work):
        parallel = layout.parallel
        assert parallel.pipeline_parallel_size == 1 or parallel.context_parallel_size == 1
        assert isinstance(layout, Layout) and (parallel.tensor_parallel_size <= work.machine.num_cores)
