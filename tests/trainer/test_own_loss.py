"""A compute_loss of the user's that looks at the logits trains a sharded model as it does one process."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.trainer.own_loss import has_own_loss
from tests.distributed import run_ranks
from tests.trainer.features import Kit, trained
from tests.trainer.test_features import assert_same


class Confident:
    """Adds the entropy of the predictions to the model's own loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        log_probabilities = outputs.logits.float().log_softmax(-1)
        loss = outputs.loss - 0.3 * (log_probabilities.exp() * log_probabilities).sum(-1).mean()
        return (loss, outputs) if return_outputs else loss


class Stock(Confident, Trainer):
    """In one process."""


class Ours(Confident, NeuronTrainer):
    """The same with the import switched."""


def on_ranks(rank, world_size, directory, replicas, own):
    return trained(Kit(Ours, NeuronTrainingArguments, directory, replicas, own))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_loss_that_looks_at_the_logits_is_that_of_one_process(tmp_path, world_size, device="neuron"):
    replicas, own = world_size // 2, dict(tensor_parallel_size=2)
    ranks = run_ranks(on_ranks, world_size, str(tmp_path / "ours"), replicas, own, device=device, timeout=180)
    expected = trained(Kit(Stock, TrainingArguments, str(tmp_path / "stock"), 1, {"use_cpu": True}))
    for rank, result in enumerate(ranks):
        assert torch.tensor(result["logs"][0]).isfinite().all()
        assert_same(result, expected, f"rank {rank}")


def test_only_a_compute_loss_of_another_origin_is_the_users():
    assert has_own_loss(Ours) and not has_own_loss(NeuronTrainer)
