"""What NeuronTrainer takes for a model, and what it refuses."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainingArguments,
)

from optimum_trn import NeuronModelForCausalLM, ParallelConfig
from optimum_trn.errors import MeshError, PlanError, UnsupportedModelError
from optimum_trn.patching import state_of
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer import scenario


def arguments(directory, **options):
    return NeuronTrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": [],
            **options,
        }
    )


def losses(trainer):
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]


def three_ways(rank, world_size, directory, saved):
    """A plain model, one from model_init and one whose ranks only ever held their shards, trained alike."""
    options = arguments(directory, tensor_parallel_size=2)
    model = NeuronModelForCausalLM.from_pretrained(saved, parallel_config=ParallelConfig(tensor_parallel_size=2))
    loaded = losses(NeuronTrainer(model=model, args=options, train_dataset=scenario.rows(8)))

    torch.manual_seed(rank)
    model = scenario.llama()
    if rank == 1:  # the weights of rank 0 count, as in data-parallel training
        torch.nn.init.zeros_(model.model.norm.weight)
    plain = losses(NeuronTrainer(model=model, args=options, train_dataset=scenario.rows(8)))

    trainer = NeuronTrainer(model_init=lambda: scenario.llama(), args=options, train_dataset=scenario.rows(8))
    first, again = losses(trainer), losses(trainer)
    assert state_of(trainer.model).config.tensor_parallel_size == 2
    return [loaded, plain, first, again[-3:]]


def test_plain_loaded_and_initialised_models_train_alike(tmp_path):
    scenario.llama().save_pretrained(tmp_path / "saved")
    stock = Trainer(
        model=scenario.llama(),
        args=TrainingArguments(
            **{**vars_of(arguments(tmp_path, use_cpu=True)), "use_cpu": True},
        ),
        train_dataset=scenario.rows(8),
    )
    expected = losses(stock)
    for per_rank in run_ranks(three_ways, 2, str(tmp_path), str(tmp_path / "saved")):
        for found in per_rank:
            assert found == pytest.approx(expected, rel=1e-5)


def trained_twice(rank, world_size, directory):
    """Data parallel with ZeRO-1: the second call continues with the optimizer of the first."""
    trainer = NeuronTrainer(model=scenario.llama(), args=arguments(directory), train_dataset=scenario.rows(12))
    return losses(trainer), losses(trainer)[-3:]


def test_train_may_be_called_again(tmp_path):
    options = {**vars_of(arguments(tmp_path, use_cpu=True)), "use_cpu": True, "per_device_train_batch_size": 4}
    stock = Trainer(model=scenario.llama(), args=TrainingArguments(**options), train_dataset=scenario.rows(12))
    expected = losses(stock), losses(stock)[-3:]
    for found in run_ranks(trained_twice, 2, str(tmp_path)):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)


def needs_matrices(rank, world_size, directory):
    found = []
    for rows, options in [
        (4, dict(tensor_parallel_size=2)),
        (2, dict(mics_partition_size=2)),
        (2, dict()),
    ]:
        options = arguments(directory, optim="adafactor", **options, per_device_train_batch_size=rows)
        found.append(losses(NeuronTrainer(model=scenario.llama(), args=options, train_dataset=scenario.rows(8))))
    return found


def test_an_optimizer_that_needs_whole_parameters_gets_them_on_shards_of_any_kind(tmp_path):
    options = {**vars_of(arguments(tmp_path, use_cpu=True)), "use_cpu": True, "per_device_train_batch_size": 4}
    stock = Trainer(
        model=scenario.llama(), args=TrainingArguments(**options, optim="adafactor"), train_dataset=scenario.rows(8)
    )
    expected = losses(stock)
    for per_rank in run_ranks(needs_matrices, 2, str(tmp_path)):
        for found in per_rank:
            assert found == pytest.approx(expected, rel=1e-5)


def vars_of(options):
    keys = ("output_dir", "max_steps", "per_device_train_batch_size", "learning_rate", "logging_steps", "save_strategy")
    return {**{key: getattr(options, key) for key in keys}, "disable_tqdm": True, "report_to": []}


def refusals(rank, world_size, directory):
    """The error of each thing that can't be trained at these degrees."""

    def text_of(error, call):
        with pytest.raises(error) as caught:
            call()
        return str(caught.value)

    options = arguments(directory, tensor_parallel_size=2)
    two = ParallelConfig(tensor_parallel_size=2)
    loaded = NeuronModelForCausalLM.from_config(scenario.llama().config, parallel_config=two)
    one_head = scenario.llama(num_attention_heads=1, num_key_value_heads=1, hidden_size=16)
    mamba = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    return [
        text_of(MeshError, lambda: NeuronTrainer(model=loaded, args=arguments(directory))),
        text_of(PlanError, lambda: NeuronTrainer(model=one_head, args=options)),
        text_of(UnsupportedModelError, lambda: NeuronTrainer(model=mamba, args=options)),
    ]


def test_models_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    first, second = run_ranks(refusals, 2, str(tmp_path))
    assert first == second
    degrees, heads, family = first
    assert "loaded at ParallelConfig(tensor_parallel_size=2" in degrees
    assert "the training arguments say ParallelConfig(tensor_parallel_size=1" in degrees
    assert "num_attention_heads" in heads and "1" in heads and "2" in heads
    assert "mamba" in family


def classify(rank, world_size, directory):
    """A classifier, data-parallel only: its loss is a mean over rows, not over tokens."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=scenario.VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = [
        {
            "input_ids": row["input_ids"],
            "attention_mask": torch.ones_like(row["input_ids"]),
            "labels": torch.tensor(n % 2),
        }
        for n, row in enumerate(scenario.rows(7))
    ]
    on_cpu = {"use_cpu": True} if world_size == 1 else {}
    model = BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False  # its forward takes num_items_in_batch and ignores it
    trainer = NeuronTrainer(
        model=model,
        args=arguments(directory, per_device_eval_batch_size=6 // world_size, **on_cpu),
        eval_dataset=rows,
    )
    metrics = trainer.evaluate()
    predictions = trainer.predict(rows)
    return metrics["eval_loss"], predictions.predictions, predictions.label_ids


def test_evaluation_of_a_mean_loss_over_rows_is_exact(tmp_path):
    loss, predictions, labels = classify(0, 1, str(tmp_path))
    for found in run_ranks(classify, 3, str(tmp_path)):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert found[1] == pytest.approx(predictions, rel=1e-4, abs=1e-5)
        assert found[2].tolist() == labels.tolist()
