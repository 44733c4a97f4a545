"""Every cause of a recompilation is named with what changed and where; a clean run compiles a constant number."""

import linecache
import re
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_trn.device.recorded import last_step
from optimum_trn.device.step_graphs import step_graphs

ROWS, LENGTH, WIDTH = 4, 16, 8


@pytest.fixture
def graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path))
    torch.neuron.init()
    found = step_graphs()
    found.forget()
    return found


class Job:
    """A training loop of one's own, in which tests plant one cause each."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(32, WIDTH), torch.nn.Linear(WIDTH, 1)).to("neuron")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

    def forward(self, rows=ROWS, length=LENGTH):
        batch = {"input_ids": torch.randint(0, 32, (rows, length))}
        batch = {name: tensor.to("neuron") for name, tensor in batch.items()}
        return self.model(batch["input_ids"]).square().mean()

    def step(self):
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def train(self, steps, **batch):
        for _ in range(steps):
            self.forward(**batch).backward()
            self.step()


def causes(graphs, since):
    graphs.mark_step()
    return [compilation.cause for compilation in graphs.compilations[since:]]


def code_at(cause):
    """The source of the line that a cause names."""
    file, line = re.search(r"(\S+\.py):(\d+)", cause).groups()
    assert file.endswith("test_step_graphs.py")
    return linecache.getline(__file__, int(line))


def warmed_up(graphs, steps=3):
    job = Job()
    job.train(steps)
    return job, graphs.graphs


def test_a_clean_run_compiles_a_constant_number_of_graphs(graphs):
    job, count = warmed_up(graphs)
    job.train(5)
    assert graphs.graphs == count == 2, "the first step makes the optimizer's states, and then there is one graph"
    assert graphs.graph_breaks == 0
    assert graphs.compile_seconds > 2 * 7


def test_the_second_run_hits_the_cache_for_every_graph(graphs):
    warmed_up(graphs)
    assert graphs.cache_hits == 0
    first = {compilation.module for compilation in graphs.compilations}
    graphs.forget()
    warmed_up(graphs)
    assert graphs.cache_hits == graphs.graphs == 2 and graphs.compile_seconds == 0
    assert {compilation.module for compilation in graphs.compilations} == first


def test_a_last_partial_batch_is_named(graphs):
    job, count = warmed_up(graphs)
    job.train(1, rows=3)
    (cause,) = causes(graphs, count)
    assert "input_ids (4, 16) became (3, 16) at step 4" in cause
    assert "last partial batch; set dataloader_drop_last or pad" in cause
    assert "return self.model(" in code_at(cause)


def test_another_length_in_evaluation_is_named(graphs):
    job, _ = warmed_up(graphs)
    with torch.no_grad():
        job.forward()
        count = graphs.graphs + len(causes(graphs, graphs.graphs))
        job.forward(length=24)
    (cause,) = causes(graphs, count)
    assert "input_ids (4, 16) became (4, 24) at step 4" in cause and "evaluation at another sequence length" in cause


def test_a_changed_number_is_named_with_the_line_that_uses_it(graphs):
    job = Job()

    def train(weight):
        loss = job.forward() * weight  # the number
        loss.backward()
        job.step()

    for _ in range(3):
        train(0.5)
    count = graphs.graphs
    train(0.25)
    cause = causes(graphs, count)[0]
    assert "was 0.5 and became 0.25 at step 4" in cause and "# the number" in code_at(cause)


def test_a_printed_loss_is_named_with_its_line(graphs, capsys):
    job, count = warmed_up(graphs)
    loss = job.forward()
    print(loss)  # in the middle of a step
    loss.backward()
    job.step()
    cut, *_, rest = causes(graphs, count)  # and what printing computes itself
    assert cut.startswith("a tensor was printed at ") and "# in the middle of a step" in code_at(cut)
    assert rest.startswith("it follows what was read at ") and "# in the middle of a step" in code_at(rest)
    (entry,) = graphs.breaks.values()
    assert entry.cuts >= 1 and "print(loss)" in entry.line.text


def test_a_value_that_is_read_in_every_step_is_counted_and_compiles_nothing_new(graphs):
    job = Job()
    counts = []
    for _ in range(5):
        loss = job.forward()
        loss.backward()
        if loss.item() > 1e9:  # the read
            raise AssertionError
        job.step()
        counts.append(graphs.graphs)
    assert counts[2] == counts[-1]
    (entry,) = graphs.breaks.values()
    assert (entry.reads, entry.cuts) == (5, 5) and "# the read" in entry.line.text
    assert "a value was read" in entry.kind and ".item()" in str(entry)


def test_a_copy_to_the_host_after_the_step_cuts_nothing(graphs):
    job, count = warmed_up(graphs)
    job.model[1].weight.detach().cpu()
    (entry,) = graphs.breaks.values()
    assert (entry.reads, entry.cuts) == (1, 0) and "copied to the host" in entry.kind
    assert causes(graphs, count) == []


@pytest.mark.parametrize(("before", "after", "said"), [(1, 2, "more"), (2, 1, "fewer")])
def test_changed_accumulation_is_named(graphs, before, after, said):
    job = Job()

    def train(accumulation):
        for _ in range(accumulation):
            job.forward().backward()
        job.step()

    for _ in range(3):
        train(before)
    count = graphs.graphs
    train(after)
    (cause,) = causes(graphs, count)
    assert cause.startswith(f"{said} micro-batches came before the optimizer's step at step 4")
    assert "gradient_accumulation_steps" in cause


def test_generation_with_a_growing_cache_is_named(graphs):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).to("neuron")
    model.generate(torch.ones(1, 4, dtype=torch.long, device="neuron"), max_new_tokens=5, do_sample=False)
    growing = [cause for cause in causes(graphs, 0) if "generation with a growing cache" in cause]
    assert growing and "cache_implementation='static'" in growing[-1]
    assert "model.generate(" in code_at(growing[-1])


def test_looking_at_variables_keeps_no_tensor_alive_and_leaves_what_locals_gave_alone(graphs):
    job, count = warmed_up(graphs)

    def loop(rows, with_locals):
        kept = locals() if with_locals else None
        ids = torch.randint(0, 32, (rows, LENGTH)).to("neuron")
        gone = weakref.ref(ids)
        job.model(ids).square().mean().backward()  # leaves the known graphs
        del ids
        return gone() is None, kept

    assert loop(3, False) == (True, None)
    job.step()
    assert "ids (4, 16) became (3, 16)" in causes(graphs, count)[0]
    _, kept = loop(2, True)
    assert kept["rows"] == 2


def test_a_learning_rate_that_changes_compiles_nothing_new(graphs):
    job, count = warmed_up(graphs)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.3
    job.train(2)
    assert graphs.graphs == count


def test_the_record_of_a_step_has_its_operations_and_what_ended_its_graphs(graphs):
    job, _ = warmed_up(graphs)
    job.forward().item()
    job.train(1)
    record = last_step(graphs)
    assert not record.simulated
    assert [cut.reason for cut in record.cuts] == ["scalar", "step"] and "test_step_graphs.py" in record.cuts[0].where
    names = [operation.name for operation in record.operations]
    assert names.count("aten::index_select") == names.count("aten::addmm") == 2
    product = next(operation for operation in record.operations if operation.name == "aten::addmm")
    assert (ROWS * LENGTH, WIDTH) in [tensor.shape for tensor in product.inputs]
    assert not any(name in ("aten::view", "aten::t", "aten::empty.memory_format") for name in names)
