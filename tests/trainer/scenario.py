"""One small training run with everything on, for the stock Trainer in one process and for NeuronTrainer on any mesh."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 96, 12


def llama(**overrides: Any) -> LlamaForCausalLM:
    """A tiny Llama with grouped queries, whose vectors are random: errors hide behind ones and zeros."""
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def rows(count: int, seed: int = 0, marked: bool = True) -> list[dict[str, torch.Tensor]]:
    """Rows of random tokens with different numbers of ignored labels; token 1 of each row is its number."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    labels = tokens.clone()
    for number in range(count):
        if marked:
            tokens[number, 1] = number
        labels[number, : 1 + number % 5] = -100
    return [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, items: list[Any]):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Metrics that a row too many, too few or twice would change."""
    seen = prediction.label_ids != -100
    right = (np.roll(prediction.predictions, 1, axis=1) == prediction.label_ids) & seen
    return {
        "rows": float(len(prediction.label_ids)),
        "labels": float(seen.sum()),
        "label_sum": float(prediction.label_ids[seen].sum()),
        "right": float(right.sum()),
        "predicted": float(prediction.predictions.sum()),
    }


def run(
    trainer_class: type[Trainer],
    arguments_class: type[TrainingArguments],
    directory: str,
    *,
    model: Any = None,
    train_rows: int = 21,
    wrap_rows: int = 0,
    eval_rows: int = 13,
    iterable: bool = False,
    evaluate_first: bool = True,
    trainer_options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, evaluate, predict and save; return what a user sees of it."""
    arguments = arguments_class(
        **{
            "output_dir": directory,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "include_num_input_tokens_seen": "all",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **options,
        }
    )
    train = rows(train_rows)
    train = [*train, *train[:wrap_rows]]
    evaluation = rows(eval_rows, seed=1)
    trainer = trainer_class(
        model=llama(**(config or {})) if model is None else model,
        args=arguments,
        train_dataset=Stream(train) if iterable else train,
        eval_dataset=Stream(evaluation) if iterable else evaluation,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=argmax,
        **(trainer_options or {}),
    )
    before = trainer.evaluate() if evaluate_first else {}
    trainer.train()
    after = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(str(Path(directory, "result")))
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "flops": trainer.state.total_flos,
        "before": deterministic(before),
        "after": deterministic(after),
        "predicted": deterministic(predicted.metrics),
        "predictions": predicted.predictions,
        "label_ids": predicted.label_ids,
    }


def deterministic(values: dict[str, float]) -> dict[str, float]:
    """Metrics without what the clock says."""
    return {key: value for key, value in values.items() if not key.endswith(("_second", "_runtime", "_time"))}
