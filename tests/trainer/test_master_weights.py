"""A bfloat16 model that one process trains has float32 master weights and gradients, as it has at several ranks."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from optimum_trn.parallel.master_weights import MasterWeights, with_master_weights
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer import scenario


def trained(directory, rows=4, resume=False, **options):
    """A few steps that are smaller than what a bfloat16 weight can hold."""
    options = {
        "output_dir": directory,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    trainer = NeuronTrainer(
        model=scenario.llama().to(torch.bfloat16),
        args=NeuronTrainingArguments(**options),
        train_dataset=scenario.rows(48),
    )
    trainer.train(resume_from_checkpoint=str(Path(directory, "checkpoint-2")) if resume else None)
    optimizer = trainer.optimizer.optimizer
    masters = {span.name: part.detach().cpu() for span, part in getattr(optimizer, "parts", {}).items()}
    weights = load_file(Path(directory, "checkpoint-4", "model.safetensors"))
    return [log["loss"] for log in trainer.state.log_history if "grad_norm" in log], masters, weights


def in_one_process(rank, world_size, directory, **options):
    return trained(directory, **options)


def on_ranks(rank, world_size, directory):
    return trained(directory, rows=2)[::2]


@pytest.mark.full
def test_one_process_trains_as_two_ranks_do_and_resumes_to_the_bit(tmp_path):
    ((losses, masters, weights),) = run_ranks(in_one_process, 1, str(tmp_path / "one"))
    assert set(masters) >= set(weights)
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(masters[name].bfloat16(), weight) for name, weight in weights.items())
    moved = [masters[name] - weight.float() for name, weight in weights.items()]
    assert sum(int(difference.count_nonzero()) for difference in moved) > 1000, "nothing is finer than bfloat16"

    for found, at_two in run_ranks(on_ranks, 2, str(tmp_path / "two")):
        np.testing.assert_allclose(found, losses, rtol=2e-3)
        for name, weight in at_two.items():
            # A weight near the middle of two neighbours may be rounded to the other one.
            assert (weight != weights[name]).float().mean() < 0.02, name

    ((again, resumed, _),) = run_ranks(in_one_process, 1, str(tmp_path / "one"), resume=True)
    assert again == losses
    assert all(torch.equal(resumed[name], master) for name, master in masters.items())


def test_without_zero_1_the_optimizer_has_the_weights_of_the_model(tmp_path):
    ((_, masters, _),) = run_ranks(in_one_process, 1, str(tmp_path), zero_1=False, device="cpu")
    assert masters == {}


def small(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)


def test_steps_are_those_of_a_float32_optimizer_and_gradients_accumulate_in_float32():
    model, exact = small(), small().float()
    optimizer = with_master_weights(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    expected = torch.optim.AdamW(exact.parameters(), lr=1e-4)
    assert isinstance(optimizer, MasterWeights)
    for step in range(5):
        for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
            for scale in (1.0, 2.0**-9):
                (parameter.sum() * (step + 1) * scale).backward()
            other.grad = torch.full_like(other, (step + 1) * (1 + 2.0**-9))
            assert torch.equal(parameter.grad, other.grad)
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
    for part, parameter, other in zip(optimizer.parts.values(), model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=0)
        assert torch.equal(parameter, other.bfloat16())
        assert parameter.grad is None


def test_states_come_back_weights_of_others_count_and_closures_are_refused():
    model = small()
    optimizer = with_master_weights(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = with_master_weights(torch.optim.AdamW(twin.parameters(), lr=1e-4), twin)
    other.load_state_dict(state)
    for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
        same.grad = parameter.grad.clone()
    for one in (other, optimizer):
        one.step()
    for left, right in zip(other.parts.values(), optimizer.parts.values(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    optimizer.step()
    assert (model[0].bias - 1).abs().max() < 1e-2
    with pytest.raises(ValueError, match="AdamW takes no closure with float32 master weights: set zero_1=False"):
        optimizer.step(lambda: None)


def test_a_float32_model_keeps_its_optimizer():
    model = small(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    assert with_master_weights(optimizer, model) is optimizer
