"""A stock Hugging Face script that never heard of optimum_trn: Trainer on whatever device there is.

`python stock_trainer.py <model directory> <output directory> <report file> [tp]`, or the same under torchrun.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

model_directory, output_directory, report_file, *modes = sys.argv[1:]
tensor_parallel = "tp" in modes

arguments = TrainingArguments(
    output_dir=output_directory,
    per_device_train_batch_size=8 if tensor_parallel or int(__import__("os").environ.get("WORLD_SIZE", 1)) == 1 else 4,
    per_device_eval_batch_size=4,
    max_steps=4,
    logging_steps=1,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
model = AutoModelForCausalLM.from_pretrained(
    model_directory, **({"distributed_config": DistributedConfig(tp_size=2)} if tensor_parallel else {})
)
tokens = torch.randint(0, model.config.vocab_size, (40, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]


def shares_of_right_tokens(prediction):
    return {
        "right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean()),
        "rows": len(prediction.label_ids),
    }


trainer = Trainer(
    model, arguments, train_dataset=rows[:32], eval_dataset=rows[32:], compute_metrics=shares_of_right_tokens
)
trainer.train()
report = {
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
    "device": str(arguments.device),
    "kind": str(arguments.distributed_state.distributed_type),
    "tied": trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight
    is trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings().weight,
}
if not tensor_parallel:  # transformers' tensor-parallel evaluation counts rows twice
    report["evaluation"] = {
        name: value for name, value in trainer.evaluate().items() if name in ("eval_loss", "eval_right", "eval_rows")
    }
if trainer.is_world_process_zero():
    with open(report_file, "w") as file:
        json.dump(report, file)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
