"""What a user sees of a run with context parallelism is what the stock Trainer shows in one process."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from optimum_trn.parallel import ParallelConfig
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer import scenario
from tests.trainer.stepwise import prove
from tests.trainer.test_parity import assert_same, assert_same_weights


def trained(rank, world_size, directory, options):
    torch.manual_seed(rank)
    return scenario.run(NeuronTrainer, NeuronTrainingArguments, directory, **options)


LAYOUTS = [
    pytest.param(2, dict(context_parallel_size=2), id="cp2"),
    pytest.param(4, dict(context_parallel_size=2, tensor_parallel_size=2), id="cp2 x tp2", marks=pytest.mark.full),
    pytest.param(4, dict(context_parallel_size=2, zero_1=False), id="cp2 x dp2", marks=pytest.mark.full),
    pytest.param(4, dict(context_parallel_size=2, pipeline_parallel_size=2), id="cp2 x pp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize("world_size, degrees", LAYOUTS)
def test_training_evaluation_and_prediction_are_those_of_one_process(tmp_path, world_size, degrees):
    """Accumulation, clipping, other numbers of labels in each batch, metrics, counts and the saved weights."""
    rows = 2 * world_size // ParallelConfig(**degrees).ranks_per_copy
    stock = scenario.run(
        Trainer,
        TrainingArguments,
        str(tmp_path / "stock"),
        use_cpu=True,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        wrap_rows=0 if rows == 2 else 3,  # data-parallel ranks fill the last batch up with the first rows
    )
    options = dict(num_train_epochs=1, train_sampling_strategy="sequential", **degrees)
    for result in run_ranks(trained, world_size, str(tmp_path / "ours"), options, timeout=180):
        assert_same(result, stock)
    assert_same_weights(tmp_path / "ours" / "result", tmp_path / "stock" / "result")


CP2_PP2 = dict(context_parallel_size=2, pipeline_parallel_size=2)


def test_tokens_and_stages_shared_out_together_train_as_in_one_process():
    """Every gradient; lengths that the chunks do not divide, padding, accumulation of 2, clipping."""
    prove(4, "llama", dict(**CP2_PP2, zero_1=False), steps=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size, model_type, degrees",
    [
        (4, "gpt2", dict(**CP2_PP2, zero_1=False)),  # its positions are weights of the first stage
        (4, "gemma3_text", CP2_PP2),  # windows, by layer
        (4, "llama", dict(**CP2_PP2, zero_1=False, pipeline_schedule="interleaved_1f1b")),
        (4, "llama", dict(**CP2_PP2, zero_1=False, pipeline_schedule="zero_bubble")),
        (4, "gpt_oss", dict(**CP2_PP2, zero_1=False, pipeline_schedule="zero_bubble")),
        (8, "llama", dict(**CP2_PP2, tensor_parallel_size=2, sequence_parallel=True)),
        (8, "llama", CP2_PP2),
        (8, "mixtral", dict(**CP2_PP2, expert_parallel_size=4)),
    ],
)
def test_other_models_and_schedules_with_tokens_and_stages_shared_out(world_size, model_type, degrees):
    prove(world_size, model_type, degrees, **({"num_hidden_layers": 4} if model_type == "llama" else {}))
