"""What Trainer can do, feature by feature: each runs in one process and on any mesh, and returns numbers to compare."""

import importlib.machinery
import json
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    EvalPrediction,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging

from tests.hub import TOKEN
from tests.trainer import scenario
from tests.trainer.scenario import deterministic, llama, rows


class Kit:
    """The classes under test, where they may write, and the arguments that only one side has."""

    def __init__(self, trainer: Any, arguments: Any, directory: str, replicas: int, own: dict[str, Any]) -> None:
        self.trainer_class, self.arguments_class = trainer, arguments
        self.directory, self.own = Path(directory), own
        self.replicas = replicas
        self.rows = 4 // replicas  # of a rank in one batch, which has four in all
        self.number = 0

    def trainer(self, *, model: Any = None, train: Any = None, evaluation: Any = None, **options: Any) -> Any:
        """A trainer whose keyword arguments are told from those of its arguments by name."""
        self.number += 1
        names = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "callbacks", "model_init")
        names += ("data_collator", "optimizers", "optimizer_cls_and_kwargs", "processing_class")
        own = {name: options.pop(name) for name in names if name in options}
        arguments = self.arguments_class(
            **{
                "output_dir": str(self.directory / str(self.number)),
                "per_device_train_batch_size": self.rows,
                "per_device_eval_batch_size": self.rows,
                "max_steps": 3,
                "learning_rate": 1e-2,
                "logging_steps": 1,
                "save_strategy": "no",
                "train_sampling_strategy": "sequential",
                "report_to": [],
                "disable_tqdm": True,
                **self.own,
                **options,
            }
        )
        return self.trainer_class(
            model=None if "model_init" in own else (llama() if model is None else model),
            args=arguments,
            train_dataset=rows(16) if train is None else train,
            eval_dataset=rows(6, seed=1) if evaluation is None else evaluation,
            **own,
        )


def logs(trainer: Any, *names: str) -> list[list[float]]:
    """What was logged under each of `names`, by default losses, gradient norms and learning rates."""
    names = names or ("loss", "grad_norm", "learning_rate")
    return [[log[name] for log in trainer.state.log_history if name in log] for name in names]


def trained(kit: Kit, **options: Any) -> dict[str, Any]:
    """Three steps and an evaluation."""
    trainer = kit.trainer(**options)
    output = trainer.train()
    return {
        "logs": logs(trainer),
        "train": deterministic(output.metrics),
        "eval": deterministic(trainer.evaluate()),
    }


# ---- Evaluation -----------------------------------------------------------------------------------------------------


class BatchMetrics:
    """A compute_metrics for batch_eval_metrics: it is called once a batch, and at last for the result."""

    def __init__(self) -> None:
        self.totals = np.zeros(6)

    def __call__(self, prediction: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        labels, tokens = prediction.label_ids, prediction.predictions
        inputs = prediction.inputs["input_ids"]
        seen = labels != -100
        self.totals += np.array(
            [1, len(labels), int(seen.sum()), int(labels[seen].sum()), int(tokens.sum()), int(inputs.ndim)]
        )
        return dict(zip("abcdef", self.totals.tolist(), strict=True)) if compute_result else {}


def batch_eval_metrics(kit: Kit) -> Any:
    trainer = kit.trainer(
        compute_metrics=BatchMetrics(),
        preprocess_logits_for_metrics=scenario.argmax,
        batch_eval_metrics=True,
        include_for_metrics=["inputs", "loss"],
    )
    return deterministic(trainer.evaluate())


def metrics_of_inputs(prediction: EvalPrediction) -> dict[str, float]:
    """Metrics of inputs and losses, which a row too many or in another order would change."""
    weights = np.arange(1, len(prediction.inputs) + 1)
    return {
        "inputs": float((prediction.inputs.sum(1) * weights).sum()),
        "losses": float(prediction.losses.mean()),
        "count": float(len(prediction.losses)),
        "logits": float(np.abs(prediction.predictions).mean()),
    }


def metrics_with_inputs_and_losses(kit: Kit) -> Any:
    options = dict(compute_metrics=metrics_of_inputs, include_for_metrics=["inputs", "loss"], eval_accumulation_steps=1)
    trainer = kit.trainer(**options)
    several = trainer.evaluate({"first": rows(6, seed=1), "second": rows(5, seed=2)})
    predicted = trainer.predict(rows(7, seed=3), metric_key_prefix="probe")
    return [deterministic(several), deterministic(predicted.metrics), predicted.predictions, predicted.label_ids]


def predictions_without_labels(kit: Kit) -> Any:
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows(5, seed=4)]
    trainer = kit.trainer()
    predicted = trainer.predict(unlabelled, ignore_keys=["past_key_values"])
    losses = trainer.evaluate(rows(5, seed=5))
    lists = kit.trainer(eval_do_concat_batches=False).predict(rows(8, seed=6))
    return [predicted.predictions, deterministic(losses), np.concatenate(lists.predictions)]


def prediction_loss_only(kit: Kit) -> Any:
    trainer = kit.trainer(prediction_loss_only=True, compute_metrics=metrics_of_inputs)
    return deterministic(trainer.evaluate())


# ---- Losses ---------------------------------------------------------------------------------------------------------


class Renamed(torch.nn.Module):
    """A model of the user's own, whose labels have another name and whose loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(scenario.VOCABULARY, 8)
            self.head = torch.nn.Linear(8, scenario.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.table(input_ids))
        if targets is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def label_smoothing(kit: Kit) -> Any:
    options = {"gradient_accumulation_kwargs": {"sync_each_batch": True}, "use_seedable_sampler": False}
    return trained(kit, label_smoothing_factor=0.1, gradient_accumulation_steps=2, accelerator_config=options)


def labels_of_another_name(kit: Kit) -> Any:
    """A model of the user's own, which no plan describes: for data parallelism only."""
    data = [{"input_ids": row["input_ids"], "targets": row["input_ids"]} for row in rows(16)]
    options = dict(model=Renamed(), label_names=["targets"], compute_metrics=scenario.metrics)
    trainer = kit.trainer(train=data, evaluation=data[:6], preprocess_logits_for_metrics=scenario.argmax, **options)
    trainer.train()
    return [logs(trainer), deterministic(trainer.evaluate())]


def accumulated(kit: Kit) -> Any:
    adam = dict(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    ddp = dict(ddp_bucket_cap_mb=1, ddp_find_unused_parameters=False, ddp_static_graph=True)
    return trained(kit, gradient_accumulation_steps=2, include_num_input_tokens_seen="all", **adam, **ddp)


# ---- Memory and speed -----------------------------------------------------------------------------------------------


def caches_emptied(kit: Kit) -> Any:
    return trained(kit, torch_empty_cache_steps=2, use_cache=True)


def checkpointing_with_arguments(kit: Kit) -> Any:
    return trained(
        kit,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False, "every_n_layers": 2},
    )


def reentrant_checkpointing(kit: Kit) -> Any:
    return trained(kit, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


# ---- Data -----------------------------------------------------------------------------------------------------------


def lengths(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of different lengths."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(4, 13, (count,), generator=generator).tolist()
    tokens = [torch.randint(3, scenario.VOCABULARY, (size,), generator=generator) for size in sizes]
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads to the longest row of the batch, which differs from rank to rank."""
    longest = max(len(row["input_ids"]) for row in batch)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in batch]
        )

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids != 0).long()}


def grouped_by_length(kit: Kit) -> Any:
    trainer = kit.trainer(
        train=lengths(24),
        evaluation=lengths(7),
        data_collator=padded,
        max_steps=-1,
        num_train_epochs=2,
        train_sampling_strategy="group_by_length",
        include_num_input_tokens_seen="non_padding",
    )
    trainer.train()
    predicted = trainer.predict(lengths(7))
    tokens = trainer.state.num_input_tokens_seen
    return [logs(trainer), deterministic(trainer.evaluate()), predicted.label_ids, tokens]


class Columns(Dataset):
    """Rows with a column that the model does not take."""

    def __init__(self) -> None:
        self.items = [{**row, "comment": "no argument"} for row in rows(12)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def columns_removed_and_last_batch_dropped(kit: Kit) -> Any:
    trainer = kit.trainer(
        train=Columns(),
        max_steps=-1,
        num_train_epochs=2,
        train_sampling_strategy="random",
        data_seed=3,
        dataloader_drop_last=True,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        dataloader_prefetch_factor=2,
        dataloader_multiprocessing_context="fork",
        dataloader_pin_memory=False,
    )
    trainer.train()
    return logs(trainer)


# ---- The loop -------------------------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Notes the events, and stops the run."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return super().__getattribute__(name)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= 2
        return control


def callbacks(kit: Kit) -> Any:
    recorder = Recorder()
    trainer = kit.trainer(callbacks=[recorder], eval_strategy="steps", eval_steps=1, eval_on_start=True, eval_delay=2)
    trainer.train()
    return [recorder.events, trainer.state.global_step, logs(trainer)]


def best_model_and_early_stopping(kit: Kit) -> Any:
    trainer = kit.trainer(
        evaluation=rows(6),
        max_steps=6,
        learning_rate=0.3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    state = trainer.state
    best = Path(state.best_model_checkpoint).name
    return [best, state.best_metric, state.global_step, logs(trainer, "eval_loss"), deterministic(trainer.evaluate())]


def by_epoch(kit: Kit) -> Any:
    trainer = kit.trainer(
        max_steps=-1,
        num_train_epochs=2,
        logging_strategy="epoch",
        logging_first_step=True,
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        save_total_limit=1,
        save_only_model=True,
    )
    trainer.train()
    saved = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
    return [logs(trainer), logs(trainer, "eval_loss"), saved]


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "reduce_lr_on_plateau": {"patience": 0},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 2},
    "greedy": {"patience": 0},
}


def schedule(kit: Kit, name: str) -> Any:
    evaluated = dict(eval_strategy="steps", eval_steps=1) if name in ("reduce_lr_on_plateau", "greedy") else {}
    trainer = kit.trainer(
        model=llama(num_hidden_layers=2),
        max_steps=5,
        warmup_steps=0 if evaluated else 1,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=SCHEDULES[name],
        **evaluated,
    )
    trainer.train()
    return logs(trainer)


def every_schedule(kit: Kit) -> Any:
    return {name: schedule(kit, name) for name in SCHEDULES}


def model_init() -> Any:
    return llama()


def hyperparameter_search(kit: Kit) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trainer = kit.trainer(model_init=model_init, max_steps=2, eval_strategy="steps", eval_steps=2)
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)},
        n_trials=3,
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    return None if best is None else [best.run_id, best.objective, best.hyperparameters]


def pruned_search(kit: Kit) -> Any:
    """A trial whose first evaluation is bad is given up, on all ranks."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trainer = kit.trainer(model_init=model_init, max_steps=3, eval_strategy="steps", eval_steps=1)
    rates = [1e-2, 1.0, 1e-3]
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", *[rates[trial.number]] * 2)},
        n_trials=3,
        pruner=optuna.pruners.ThresholdPruner(upper=5.0),
    )
    steps = len(logs(trainer, "eval_loss")[0])
    return None if best is None else [best.run_id, best.objective, best.hyperparameters, steps]


# ---- Numerics and tools ---------------------------------------------------------------------------------------------


def compiled(kit: Kit) -> Any:
    return trained(kit, torch_compile=True, torch_compile_backend="aot_eager")


def deterministic_kernels(kit: Kit) -> Any:
    try:
        return trained(kit, full_determinism=True)
    finally:
        torch.use_deterministic_algorithms(False)


def activations_watched(kit: Kit) -> Any:
    return trained(kit, debug="underflow_overflow")


def memory_measured(kit: Kit) -> Any:
    trainer = kit.trainer(skip_memory_metrics=False)
    return sorted(trainer.train().metrics)


def evaluated_in_bfloat16(kit: Kit) -> Any:
    trainer = kit.trainer(bf16_full_eval=True)
    return round(trainer.evaluate()["eval_loss"], 1)


def noise_on_embeddings(kit: Kit) -> Any:
    return trained(kit, neftune_noise_alpha=5.0)


def reported_to_tensorboard(kit: Kit) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(kit.directory / "tensorboard")
    trainer = kit.trainer(report_to="tensorboard", run_name="a run")
    trainer.train()
    if not trainer.is_world_process_zero():
        return None
    events = EventAccumulator(str(kit.directory / "tensorboard")).Reload()
    return [[event.value for event in events.Scalars(name)] for name in ("train/loss", "train/grad_norm")]


# ---- What has been found wrong ---------------------------------------------------------------------------------------


def bert() -> Any:
    """A model whose forward accepts num_items_in_batch and leaves it alone: its loss is a mean over the batch."""
    config = BertConfig(
        vocab_size=scenario.VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(config)


def classified(count: int) -> list[dict[str, Any]]:
    """Rows with one label each."""
    return [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(rows(count))]


def mean_losses(kit: Kit) -> Any:
    return trained(
        kit, model=bert(), train=classified(16), evaluation=classified(6), gradient_accumulation_steps=2, max_steps=2
    )


def rates_and_counts(kit: Kit) -> Any:
    trainer = kit.trainer(evaluation=rows(10))
    measured = [trainer.evaluate(), trainer.predict(rows(10)).metrics]
    ratios = [
        round(next(value for name, value in metrics.items() if name.endswith("steps_per_second")), 0)
        / next(value for name, value in metrics.items() if name.endswith("samples_per_second"))
        for metrics in measured
    ]
    return [[round(10 * ratio) for ratio in ratios], trainer.get_num_trainable_parameters()]


def split_batches(kit: Kit) -> Any:
    options = (
        {}
        if kit.replicas == 1
        else dict(
            accelerator_config={"split_batches": True}, per_device_train_batch_size=4, per_device_eval_batch_size=4
        )
    )
    return trained(kit, evaluation=rows(7, seed=1), **options)


def metrics_written(kit: Kit) -> Any:
    recorder = Recorder()
    trainer = kit.trainer(callbacks=[recorder])
    popped = trainer.pop_callback(Recorder)
    trainer.add_callback(recorder)
    trainer.remove_callback(Recorder)
    metrics = trainer.train().metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", {**deterministic(metrics), "other": 1})
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    directory = Path(trainer.args.output_dir)
    written = json.loads((directory / "all_results.json").read_text())
    sizes = sorted(kit.trainer_class.metrics_format(metrics))
    rates = trainer.get_learning_rates()
    return [
        popped is recorder,
        len(recorder.events),
        written,
        (directory / "trainer_state.json").exists(),
        sizes,
        rates,
    ]


def reported_to_trackio(kit: Kit) -> Any:
    trackio = mock.MagicMock(__version__="99")
    trackio.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    with mock.patch.dict("sys.modules", trackio=trackio):
        places = dict(trackio_space_id="a/space", trackio_bucket_id="a/bucket", trackio_static_space_id="a/static")
        trainer = kit.trainer(
            report_to="trackio", run_name="a run", project="a project", hub_private_repo=True, **places
        )
        trainer.train()
    if not trainer.is_world_process_zero():
        assert not trackio.init.called
        return None
    logged = [call.args[0] for call in trackio.log.call_args_list]
    given = {
        name: trackio.init.call_args.kwargs[name] for name in ("project", "name", "space_id", "bucket_id", "private")
    }
    assert given["space_id"] == "a/space" and given["bucket_id"] == "a/bucket"
    return [given, len(trackio.freeze.call_args_list), [log["train/loss"] for log in logged if "train/loss" in log]]


def pushed_to_the_hub(kit: Kit) -> Any:
    trainer = kit.trainer(
        push_to_hub=True,
        hub_model_id="somebody/model",
        hub_token=TOKEN,
        hub_strategy="checkpoint",
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    trainer.push_to_hub(commit_message="The end", blocking=True)
    return None


# ---- Arguments that Trainer hands on: each of these would fail if one were ignored ---------------------------------


def losses_that_are_not_finite(kit: Kit) -> Any:
    """With the filter a loss that is no number is left out of what is logged; the weights are lost either way."""
    seen = []
    for filters in (True, False):
        calls = []

        def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, calls: list = calls) -> Any:
            calls.append(0)
            return outputs.logits.float().square().mean() * (float("nan") if len(calls) % 2 == 0 else 1.0)

        trainer = kit.trainer(
            compute_loss_func=loss, max_steps=2, logging_steps=2, logging_nan_inf_filter=filters, max_grad_norm=0.0
        )
        trainer.train()
        logged = logs(trainer, "loss")[0]
        seen.append([repr(round(value, 3)) for value in logged])
    assert seen[0] != seen[1]
    return seen


def resumed_without_skipping_data(kit: Kit) -> Any:
    """`ignore_data_skip`: the resumed run begins with the first rows; callbacks are as they were when it was saved."""
    options = dict(max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1)
    first = kit.trainer(
        callbacks=[EarlyStoppingCallback(early_stopping_patience=7)], metric_for_best_model="loss", **options
    )
    first.train()
    checkpoint = str(Path(first.args.output_dir) / "checkpoint-2")
    results = []
    for skips, restores in ((True, False), (False, True)):
        callback = EarlyStoppingCallback(early_stopping_patience=3)
        again = kit.trainer(
            callbacks=[callback],
            metric_for_best_model="loss",
            ignore_data_skip=not skips,
            restore_callback_states_from_checkpoint=restores,
            **options,
        )
        again.train(resume_from_checkpoint=checkpoint)
        patience = [
            c.early_stopping_patience for c in again.callback_handler.callbacks if hasattr(c, "early_stopping_patience")
        ]
        results.append([logs(again, "loss")[0][-2:], patience])
    assert results[0] != results[1]
    return results


def options_of_the_loader(kit: Kit) -> Any:
    """What becomes of the DataLoader's own options, on training and evaluation."""
    names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order", "drop_last")
    given = dict(
        dataloader_num_workers=2,
        dataloader_prefetch_factor=3,
        dataloader_persistent_workers=True,
        dataloader_pin_memory=False,
        dataloader_in_order=False,
        dataloader_drop_last=True,
    )
    found = []
    for options in ({}, given):
        trainer = kit.trainer(**options)
        for loader in (
            trainer.get_train_dataloader(),
            trainer.get_eval_dataloader(),
            trainer.get_test_dataloader(rows(4)),
        ):
            found.append([getattr(loader, name) for name in names if name != "pin_memory" or options])
    assert found[0] != found[3]
    return found


def options_of_the_compiler(kit: Kit) -> Any:
    trainer = kit.trainer(torch_compile=True, torch_compile_backend="eager", torch_compile_mode="reduce-overhead")
    plugin = trainer.accelerator.state.dynamo_plugin
    return [str(plugin.backend), plugin.mode]


def levels_of_the_log(kit: Kit) -> Any:
    """The first process logs at `log_level`, the others at `log_level_replica`."""
    before = transformers_logging.get_verbosity()
    try:
        trainer = kit.trainer(log_level="info", log_level_replica="critical")
        own = logging.INFO if trainer.args.process_index == 0 else logging.CRITICAL
        return [trainer.args.get_process_log_level() == own, transformers_logging.get_verbosity() == own]
    finally:
        transformers_logging.set_verbosity(before)


def only_the_model_is_saved(kit: Kit) -> Any:
    """`save_only_model` leaves out the optimizer, `save_strategy="no"` everything."""
    found = []
    for options in (
        dict(save_strategy="steps", save_steps=3, save_only_model=True),
        dict(save_strategy="steps", save_steps=3),
        dict(save_strategy="no"),
    ):
        trainer = kit.trainer(**options)
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        saved = list(Path(trainer.args.output_dir).glob("checkpoint-3/*"))
        found.append(
            [any(path.name == "model.safetensors" for path in saved), any("optimizer" in p.name for p in saved)]
        )
    assert found == [[True, False], [True, True], [False, False]]
    return found


FEATURES = {
    function.__name__: function
    for function in (
        losses_that_are_not_finite,
        resumed_without_skipping_data,
        options_of_the_loader,
        options_of_the_compiler,
        levels_of_the_log,
        only_the_model_is_saved,
        batch_eval_metrics,
        metrics_with_inputs_and_losses,
        predictions_without_labels,
        prediction_loss_only,
        label_smoothing,
        accumulated,
        caches_emptied,
        checkpointing_with_arguments,
        reentrant_checkpointing,
        grouped_by_length,
        columns_removed_and_last_batch_dropped,
        callbacks,
        best_model_and_early_stopping,
        by_epoch,
        every_schedule,
        hyperparameter_search,
        compiled,
        deterministic_kernels,
        activations_watched,
        memory_measured,
        evaluated_in_bfloat16,
        noise_on_embeddings,
        reported_to_tensorboard,
        pruned_search,
        mean_losses,
        rates_and_counts,
        split_batches,
        labels_of_another_name,
        metrics_written,
        reported_to_trackio,
    )
}
