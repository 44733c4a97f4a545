"""Seq2SeqTrainer on a mesh: what it generates, and the metrics of that, are those of one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from optimum_trn.trainer import NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments, NeuronTrainerMixin
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.trainer.features import Kit, logs
from tests.trainer.scenario import deterministic
from tests.trainer.test_features import assert_same

VOCABULARY = 64


class Mixed(NeuronTrainerMixin, Seq2SeqTrainer):
    """As a user composes it."""


def t5():
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        num_heads=4,
        d_ff=48,
        num_layers=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # or every token is the same
    return model.double()  # with such weights the rounding of float32 grows from step to step


def pairs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(2, VOCABULARY, (count, 9), generator=generator)
    target = torch.randint(2, VOCABULARY, (count, 6), generator=generator)
    return [
        {"input_ids": s, "attention_mask": torch.ones(9).long(), "labels": t}
        for s, t in zip(source, target, strict=True)
    ]


def metrics(prediction):
    weights = np.arange(1, len(prediction.predictions) + 1)
    return {
        "tokens": float((prediction.predictions.sum(1) * weights).sum()),
        "rows": float(len(prediction.predictions)),
        "labels": float((prediction.label_ids.sum(1) * weights).sum()),
    }


def run(kit):
    trainer = kit.trainer(
        model=t5(),
        train=pairs(12),
        evaluation=pairs(7, seed=1),
        compute_metrics=metrics,
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=2,
        learning_rate=1e-3,
        optim="sgd",  # AdamW makes whole steps of the rounding of small gradients
        include_for_metrics=["inputs"],
    )
    before = trainer.evaluate()
    trainer.train()
    predicted = trainer.predict(pairs(5, seed=2), max_new_tokens=5, num_beams=1)
    configured = kit.trainer(
        model=t5(),
        predict_with_generate=True,
        generation_config=GenerationConfig(max_new_tokens=4, num_beams=3, decoder_start_token_id=0, pad_token_id=0),
    )
    other = configured.predict(pairs(3, seed=3))
    several = []
    if kit.replicas == 1:
        several = configured.predict(pairs(3, seed=3), num_return_sequences=2, num_beams=3).predictions
        assert len(several) == 6
    return [
        logs(trainer),
        deterministic(before),
        deterministic(trainer.evaluate()),
        deterministic(predicted.metrics),
        predicted.predictions,
        other.predictions,
        other.label_ids,
        several,
    ]


def on_ranks(rank, world_size, directory, replicas, own):
    local_device()  # takes float64
    return run(
        Kit(Mixed if replicas == 1 else NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments, directory, replicas, own)
    )


MESHES = {"tp2": (2, 1), "dp2": (2, 2), "tp2 x dp2": (4, 2)}


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=[] if name == "tp2" else pytest.mark.full) for name in MESHES]
)
def test_generated_evaluation_is_that_of_one_process(tmp_path, mesh, device="neuron"):
    world_size, replicas = MESHES[mesh]
    own = dict(tensor_parallel_size=world_size // replicas)
    ranks = run_ranks(
        on_ranks, world_size, str(tmp_path / "ours"), replicas, own, device=device, environment=FLOAT64, timeout=180
    )
    expected = run(Kit(Seq2SeqTrainer, Seq2SeqTrainingArguments, str(tmp_path / "stock"), 1, {"use_cpu": True}))
    if replicas > 1:
        expected[-1] = []  # refused, see below
    assert len(set(expected[4].flatten().tolist())) > 5, "the model generates one token only"
    for rank, result in enumerate(ranks):
        assert_same(result, expected, f"rank {rank}")


def test_a_pipeline_refuses_to_generate_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="predict_with_generate=True is refused: a pipeline"):
        NeuronSeq2SeqTrainingArguments(output_dir=str(tmp_path), pipeline_parallel_size=2, predict_with_generate=True)


def test_data_parallel_ranks_refuse_several_sequences_for_a_row():
    trainer = object.__new__(NeuronSeq2SeqTrainer)
    trainer.args = SimpleNamespace(predict_with_generate=True)
    trainer.model = SimpleNamespace(generation_config=GenerationConfig())
    trainer.accelerator = SimpleNamespace(num_processes=2)
    trainer._refuse_several_sequences({})
    with pytest.raises(ValueError, match="num_return_sequences=3 with 2 data-parallel ranks"):
        trainer._refuse_several_sequences({"generation_config": GenerationConfig(num_return_sequences=3, num_beams=3)})
