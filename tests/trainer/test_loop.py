"""Training loops of one's own with accelerate: on sharded models they have the numbers of one process."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from optimum_trn.errors import MeshError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model
from optimum_trn.trainer.loop import NeuronAccelerator
from tests.distributed import run_ranks
from tests.trainer.scenario import llama, rows
from tests.trainer.test_features import assert_same


def loop(accelerator, model, batch_size, directory):
    """Two epochs with accumulation and clipping, an evaluation with rows left over, and two steps after resuming."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / accelerator.num_processes))
    train, evaluation = DataLoader(rows(20, marked=False), batch_size), DataLoader(rows(7, seed=1), batch_size)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)
    losses, norms, rates = [], [], []

    def epoch():
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                # Rows have different numbers of labels: a mean over them is what every rank can average.
                logits = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
                loss = -logits.gather(-1, batch["input_ids"].unsqueeze(-1)).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            rates.append(schedule.get_last_lr()[0])

    epoch()
    accelerator.save_state(directory)
    epoch()
    first = losses[-len(losses) // 2 :]
    accelerator.load_state(directory)
    epoch()
    model.eval()
    tokens, numbers = [], []
    for batch in evaluation:
        with torch.no_grad():
            predicted = model(input_ids=batch["input_ids"]).logits.argmax(-1)
        predicted, number = accelerator.gather_for_metrics((predicted, batch["input_ids"][:, 1]))
        tokens.append(predicted.sum(-1).cpu())
        numbers.append(number.cpu())
    assert losses[-len(first) :] == pytest.approx(first, rel=1e-5), "what was resumed goes another way"
    return [losses, norms, rates, torch.cat(numbers).tolist(), torch.cat(tokens).tolist()]


def on_ranks(rank, world_size, directory, size):
    config = ParallelConfig(tensor_parallel_size=size)
    accelerator = NeuronAccelerator(parallel_config=config, gradient_accumulation_steps=2)
    model = llama()
    with pytest.raises(MeshError, match=r"LlamaForCausalLM is shared by no degree, but this accelerator by tensor_par"):
        accelerator.prepare(model)
    patch_model(model, config)
    assert accelerator.num_processes == world_size // size
    return loop(accelerator, model, 4 // accelerator.num_processes, directory)


@pytest.mark.parametrize(
    ("world_size", "size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)], ids=["tp2", "tp2 x dp2"]
)
def test_a_loop_on_a_sharded_model_has_the_numbers_of_one_process(tmp_path, world_size, size):
    ranks = run_ranks(on_ranks, world_size, str(tmp_path / "ours"), size)
    expected = loop(Accelerator(cpu=True, gradient_accumulation_steps=2), llama(), 4, str(tmp_path / "stock"))
    assert expected[3] == list(range(7))
    for rank, result in enumerate(ranks):
        assert_same(result, expected, f"rank {rank}")


def with_a_stock_accelerator(rank, world_size):
    model = llama()
    patch_model(model, ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is sharded .*NeuronAccelerator\(parallel_config=...\)"):
        Accelerator().prepare(model)
    Accelerator().prepare(llama())


def test_a_stock_accelerator_refuses_a_sharded_model_with_the_way_out():
    run_ranks(with_a_stock_accelerator, 2)


def test_degrees_that_do_not_fit_the_world_are_refused_before_anything_starts():
    with pytest.raises(MeshError, match="tensor_parallel_size=2 needs 2 processes"):
        NeuronAccelerator(parallel_config=ParallelConfig(tensor_parallel_size=2))
