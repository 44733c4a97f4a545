"""Fine-tunes a causal language model on NeuronCores that Ray Train has found, on one machine or on a cluster of them.

    python examples/finetune_ray.py --num_workers 2 --tensor_parallel_size 2

Ray starts one worker a NeuronCore and carries the job past one machine; inside, the training code is the same as under
torchrun. Needs the extra `ray`. The model is small and the text comes with Python, so that it runs without a network.
"""

from __future__ import annotations  # the worker gets this file without its imports for annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(options: dict[str, Any]) -> None:
    """What every worker runs."""
    # Ray tells accelerate to use the CPU where it sees no GPU, and has another name for what torchrun calls GROUP_RANK.
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    os.environ["GROUP_RANK"] = os.environ["NODE_RANK"]
    os.environ["GROUP_WORLD_SIZE"] = str(options["num_nodes"])
    from pydoc_data.topics import topics

    from datasets import Dataset
    from transformers import LlamaConfig, TrainerCallback, default_data_collator, set_seed

    from optimum_trn import NeuronModelForCausalLM, NeuronTrainer, NeuronTrainingArguments

    class Report(TrainerCallback):
        """Hands every logged loss to Ray, which keeps the metrics of the run."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                ray.train.report({"step": state.global_step, "loss": logs["loss"]})

    arguments = NeuronTrainingArguments(
        output_dir=options["output_dir"],
        tensor_parallel_size=options["tensor_parallel_size"],
        max_steps=options["max_steps"],
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    text = "".join(topics[name] for name in sorted(topics)).encode()
    rows = [list(text[start : start + 64]) for start in range(0, 64 * 256, 64)]
    set_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = NeuronTrainer(
        model=NeuronModelForCausalLM.from_config(config, parallel_config=arguments.parallel_config),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        data_collator=default_data_collator,
        callbacks=[Report()],
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        Path(options["output_dir"], "summary.json").write_text(json.dumps({"losses": losses}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_workers", type=int, default=2, help="NeuronCores, one worker each.")
    parser.add_argument("--num_nodes", type=int, default=1, help="Instances that Ray spreads them over.")
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="outputs/finetune_ray", help="A directory that all nodes share.")
    options = vars(parser.parse_args())
    options["output_dir"] = str(Path(options["output_dir"]).absolute())

    # The worker joins the process group before its first line runs: torch must know the device when it is imported.
    ray.init(runtime_env={"env_vars": {"OPTIMUM_TRN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}})
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config=options,
            torch_config=TorchConfig(backend="neuron"),
            scaling_config=ScalingConfig(num_workers=options["num_workers"], resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=storage),
        )
        trainer.fit()
    losses = json.loads(Path(options["output_dir"], "summary.json").read_text())["losses"]
    print(f"Loss {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step {len(losses)}; saved in {options['output_dir']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
