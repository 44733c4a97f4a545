"""Optimizer states in the memory of the host: the same training, with that much more room on the core."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from optimum_trn.device.build import load_extension
from optimum_trn.errors import MeshError, NeuronOutOfMemoryError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.trainer import scenario, stepwise

STEPS = 4


@pytest.mark.parametrize(
    ("world_size", "model_type", "degrees"),
    [
        (2, "llama", {}),
        pytest.param(2, "llama", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param(4, "qwen2", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param(4, "llama", {"pipeline_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param(2, "qwen3_moe", {"expert_parallel_size": 2}, marks=pytest.mark.full),
    ],
)
def test_losses_norms_and_weights_are_those_of_one_process(world_size, model_type, degrees):
    stepwise.prove(world_size, model_type, {**degrees, "optimizer_offload": True}, device="neuron")


def whole_parameters(rank, world_size):
    def adafactor(parameters):
        return torch.optim.Adafactor(parameters, lr=1e-2)

    degrees = {"tensor_parallel_size": 2, "optimizer_offload": True}
    return stepwise.train(rank, world_size, "llama", degrees, {}, optimizer=adafactor)


@pytest.mark.full
def test_an_optimizer_that_needs_whole_parameters_has_them_in_the_host():
    for worst in run_ranks(whole_parameters, 2, device="neuron", environment=FLOAT64):
        assert max(worst.values()) < stepwise.EXACT, worst


def trained(directory, resume=False, dtype=torch.float32, **options):
    torch.neuron.reset_peak_memory_stats()
    before = torch.neuron.memory_allocated()
    model = scenario.llama(hidden_size=128, intermediate_size=256).to(dtype)
    trainer = NeuronTrainer(
        model=model,
        args=NeuronTrainingArguments(
            **{
                "output_dir": directory,
                "per_device_train_batch_size": 4,
                "max_steps": STEPS,
                "logging_steps": 1,
                "save_strategy": "steps",
                "save_steps": 2,
                "report_to": [],
                "disable_tqdm": True,
                **options,
            }
        ),
        train_dataset=scenario.rows(48),
    )
    trainer.train(resume_from_checkpoint=str(Path(directory, "checkpoint-2")) if resume else None)
    optimizer = trainer.optimizer.optimizer
    states = [s for state in optimizer.state.values() for s in state.values() if s.ndim]
    losses = [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "losses": losses,
        "peak": torch.neuron.max_memory_allocated() - before,
        "state_bytes": sum(state.nbytes for state in states),
        "devices": {state.device.type for state in states},
        "weights": load_file(Path(directory, f"checkpoint-{STEPS}", "model.safetensors")),
    }


def with_and_without(rank, world_size, directory, **options):
    held = trained(f"{directory}/held", **options)
    offloaded = trained(f"{directory}/offloaded", optimizer_offload=True, **options)
    resumed = [
        trained(f"{directory}/held", resume=True, optimizer_offload=True, **options)["losses"],
        trained(f"{directory}/offloaded", resume=True, **options)["losses"],
    ]
    return held, offloaded, resumed


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        pytest.param(1, {"dtype": torch.bfloat16}, marks=pytest.mark.full),
        pytest.param(2, {}, marks=pytest.mark.full),
        pytest.param(2, {"tensor_parallel_size": 2, "dtype": torch.bfloat16}, marks=pytest.mark.full),
    ],
)
def test_the_core_has_the_optimizers_bytes_for_other_things_and_checkpoints_go_both_ways(tmp_path, world_size, options):
    for held, offloaded, resumed in run_ranks(with_and_without, world_size, str(tmp_path), **options):
        np.testing.assert_allclose(offloaded["losses"], held["losses"], rtol=1e-6)
        for losses in resumed:
            np.testing.assert_allclose(losses, held["losses"], rtol=1e-6)
        for name, weight in held["weights"].items():
            torch.testing.assert_close(offloaded["weights"][name], weight, rtol=1e-5, atol=1e-7)
        assert (held["devices"], offloaded["devices"]) == ({"neuron"}, {"cpu"})
        assert offloaded["state_bytes"] == held["state_bytes"]
        assert offloaded["peak"] <= held["peak"] - held["state_bytes"]


def on_a_small_core(rank, world_size, directory):
    """Trains where only half of the states would fit: with them in the host, and on the core."""
    extension = load_extension()
    measured = trained(f"{directory}/measured", optimizer_offload=True)
    needed = measured["peak"] + measured["state_bytes"] // 2
    gc.collect()
    total = torch.neuron.get_device_properties(0).total_memory
    extension.set_limit(0, torch.neuron.memory_allocated() + needed)
    try:
        losses = trained(f"{directory}/offloaded", optimizer_offload=True)["losses"]
        with pytest.raises(NeuronOutOfMemoryError) as caught:
            trained(f"{directory}/held")
    finally:
        extension.set_limit(0, total)
    return losses, str(caught.value)


def test_a_model_whose_states_exceed_the_memory_of_the_core_trains_with_them_in_the_host(tmp_path):
    ((losses, error),) = run_ranks(on_a_small_core, 1, str(tmp_path))
    assert len(losses) == STEPS
    assert "out of memory" in error


@pytest.mark.parametrize(
    ("degrees", "error"),
    [
        ({"zero_1": False}, "zero_1 is False: leave zero_1 on"),
        ({"mics_partition_size": 2}, "optimizer_offload=True can't be combined with mics_partition_size=2"),
    ],
)
def test_states_that_are_not_shared_out_can_not_be_offloaded(degrees, error):
    with pytest.raises(MeshError, match=error):
        ParallelConfig(optimizer_offload=True, **degrees)
