"""Padding to few shapes changes no loss, no prediction and no count, and no graph is compiled after the first ones."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.trainer.padding import Padding, PadToBuckets, parsed
from tests.distributed import run_ranks

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
BERT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
LENGTHS = (5, 9, 17, 12, 20, 3, 7, 30, 18, 11)  # 10 rows in batches of 4: the last has 2


def rows(count, labels, vocab=64):
    generator = torch.Generator().manual_seed(5)
    result = []
    for number in range(count):
        tokens = torch.randint(1, vocab, (LENGTHS[number % len(LENGTHS)],), generator=generator).tolist()
        row = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        row["labels"] = number % 3 if labels == "row" else tokens[:4] if labels == "decoder" else tokens
        result.append(row)
    return result


class Collator:
    """Pads to the longest of a batch, as transformers' collators do, without a tokenizer."""

    def __call__(self, features):
        longest = {
            name: max(len(f[name]) if isinstance(f[name], list) else 0 for f in features) for name in features[0]
        }
        fills = {"labels": -100}
        return {
            name: torch.tensor(
                [f[name] + [fills.get(name, 0)] * (longest[name] - len(f[name])) for f in features]
                if longest[name]
                else [f[name] for f in features]
            )
            for name in features[0]
        }


CASES = {
    "causal": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), "token"),
    "masked": (lambda: BertForMaskedLM(BertConfig(**SIZES, **BERT)), "token"),
    "classes": (lambda: BertForSequenceClassification(BertConfig(**SIZES, **BERT)), "row"),
    "classes of a decoder": (lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3)), "row"),
    "sequence to sequence": (
        lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        "decoder",
    ),
}


def run(trainer_class, arguments_class, case, directory, **arguments):
    make, labels = CASES[case]
    torch.manual_seed(3)
    model = make()
    data = rows(10, labels)
    shapes = set()
    model.register_forward_pre_hook(
        lambda module, _, inputs: shapes.add((module.training, tuple(inputs["input_ids"].shape))), with_kwargs=True
    )
    trainer = trainer_class(
        model,
        arguments_class(
            output_dir=directory,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            include_num_input_tokens_seen=True,
            include_for_metrics=["inputs", "loss"],
            **arguments,
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=Collator(),
        compute_metrics=lambda p: {"inputs": float(np.sum(p.inputs)), "rows": len(p.label_ids)},
    )
    trainer.train()
    history = [
        {name: entry[name] for name in ("loss", "grad_norm", "num_input_tokens_seen") if name in entry}
        for entry in trainer.state.log_history
    ]
    output = trainer.predict(data)
    logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    metrics = {name: output.metrics[f"test_{name}"] for name in ("loss", "rows", "inputs")}
    return history, trainer.state.total_flos, logits, output.label_ids, metrics, shapes


def assert_same(found, expected):
    for entry, other in zip(found[0], expected[0], strict=True):
        assert entry == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert found[1] == expected[1]
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found[3], expected[3])
    assert found[4] == pytest.approx(expected[4], rel=1e-4)


def padded_run(rank, world_size, case, directory, arguments):
    return run(NeuronTrainer, NeuronTrainingArguments, case, directory, **arguments)


@pytest.mark.parametrize("case", CASES)
def test_losses_predictions_and_counts_are_those_of_the_stock_trainer(tmp_path, case):
    expected = run(Trainer, TrainingArguments, case, str(tmp_path / "stock"), use_cpu=True)
    found = run(NeuronTrainer, NeuronTrainingArguments, case, str(tmp_path / "ours"), use_cpu=True, static_shapes="32")
    assert_same(found, expected)
    assert {shape for training, shape in found[-1] if training} == {(4, 32)}
    assert len({shape for training, shape in expected[-1] if training}) > 1


@pytest.mark.full
@pytest.mark.parametrize("arguments", [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)], ids=str)
def test_sharded_models_have_the_same_losses(tmp_path, arguments):
    expected = run(Trainer, TrainingArguments, "causal", str(tmp_path / "stock"), use_cpu=True)
    own = dict(static_shapes="powers_of_two", **arguments)
    for found in run_ranks(padded_run, 2, "causal", str(tmp_path / "ours"), own, device="cpu", timeout=300):
        if "pipeline_parallel_size" in arguments:
            for entry, other in zip(found[0], expected[0], strict=True):
                assert entry == pytest.approx(other, rel=1e-4, abs=1e-5)
        else:
            assert_same((found[0], expected[1], *found[2:]), expected)


def graphs_of_a_run(rank, world_size, directory):
    """The shapes of all batches, and the number of graphs after the first steps of each kind and at the end."""
    torch.manual_seed(3)
    data = rows(10, "token")
    seen = []
    trainer = NeuronTrainer(
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        NeuronTrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=3,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=1,
            torch_compile=True,
            static_shapes="32",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=Collator(),
    )
    log = trainer.log
    trainer.log = lambda logs, *rest: (seen.append(counters["stats"]["unique_graphs"]), log(logs, *rest))
    trainer.train()
    trainer.predict(data)
    return [*seen, counters["stats"]["unique_graphs"]]


@pytest.mark.full
def test_no_graph_is_compiled_after_the_first_epoch(tmp_path):
    (seen,) = run_ranks(graphs_of_a_run, 1, str(tmp_path), device="neuron", timeout=600)
    assert seen[0] > 0
    assert len(set(seen[3:])) == 1  # 3 steps and an evaluation are an epoch, the last batch of each is short


def test_a_model_whose_loss_is_a_mean_over_rows_is_left_alone(tmp_path, caplog):
    model = BertForSequenceClassification(BertConfig(**SIZES, **{**BERT, "num_labels": 1}))
    trainer = NeuronTrainer(
        model, NeuronTrainingArguments(str(tmp_path), use_cpu=True, static_shapes="32", report_to=[])
    )
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2)}
    assert trainer._prepare_inputs(batch)["input_ids"].shape == (2, 5)


def test_a_loss_of_the_users_own_is_left_alone(tmp_path):
    class Own(NeuronTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    trainer = Own(
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        NeuronTrainingArguments(str(tmp_path), use_cpu=True, static_shapes="32", report_to=[]),
    )
    assert trainer._chosen_padding() is None


def test_images_are_padded_in_rows(tmp_path):
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    trainer = NeuronTrainer(
        ViTForImageClassification(config),
        NeuronTrainingArguments(
            str(tmp_path), use_cpu=True, static_shapes="auto", per_device_eval_batch_size=4, report_to=[]
        ),
        data_collator=default_data_collator,
    )
    trainer.args.static_shapes = "32"
    data = [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 3} for number in range(6)]
    stock = Trainer(trainer.model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    found, expected = trainer.predict(data), stock.predict(data)
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-5, atol=1e-6)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"])


def test_buckets():
    padding = Padding(longest=100)
    assert [padding.length_for(n) for n in (1, 16, 17, 64, 65, 100, 101)] == [16, 16, 32, 64, 100, 100, 101]
    padding = Padding(parsed("512, 128"))
    assert [padding.length_for(n) for n in (1, 128, 129, 600)] == [128, 128, 512, 600]
    with pytest.raises(ValueError, match="names no lengths"):
        parsed("long")


def test_a_collator_for_loops_of_ones_own():
    collate = PadToBuckets(Collator(), Padding((8,)), rows=4)
    batch = collate([{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8, 9], "labels": [7, 8, 9]}])
    assert batch["input_ids"].tolist()[1] == [7, 8, 9, 0, 0, 0, 0, 0]
    assert batch["attention_mask"].sum(1).tolist() == [3, 3, 3, 3]
    assert batch["labels"].tolist()[2:] == [[-100] * 8] * 2
    with pytest.raises(ValueError, match="without changing its loss"):
        collate([{"input_ids": [5, 6], "labels": 0.5}])
