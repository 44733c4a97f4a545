"""A training loop of one's own with accelerate, tensor-parallel: no Trainer, every step in sight.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --tensor_parallel_size 2
    OPTIMUM_TRN_AUTOLOAD=1 accelerate launch --num_processes 2 examples/accelerate_loop.py --tensor_parallel_size 2
    python examples/accelerate_loop.py --tensor_parallel_size 2 --notebook_processes 2   # as from a notebook

needs no network: it trains a small Llama on the reference text that comes with Python. `--model` takes a Hub id or a
local path instead. Beside a stock loop, one line differs, where the accelerator is made, and the model is loaded by
`NeuronModelForCausalLM`, before its optimizer is made.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from accelerate import notebook_launcher
from accelerate.utils import set_seed
from datasets import Dataset
from finetune_clm import EXPECTED_ERRORS, pack, reference_texts, train_tokenizer
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, default_data_collator, get_cosine_schedule_with_warmup

from optimum_trn import NeuronAccelerator, NeuronModelForCausalLM, ParallelConfig


def make_model(options: argparse.Namespace, accelerator: NeuronAccelerator, degrees: ParallelConfig):
    """A pretrained model, or a small Llama with random weights, and its tokenizer."""
    if options.model is not None:
        model = NeuronModelForCausalLM.from_pretrained(options.model, degrees, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(options.model)
    directory = options.output_dir / "tokenizer"
    with accelerator.main_process_first():  # training it twice does not give the same one
        if accelerator.is_main_process:
            train_tokenizer(reference_texts(), 1024).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sizes = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4)
    return NeuronModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **sizes), degrees), tokenizer


def train(options: argparse.Namespace) -> None:
    degrees = ParallelConfig(tensor_parallel_size=options.tensor_parallel_size)
    accelerator = NeuronAccelerator(parallel_config=degrees, gradient_accumulation_steps=options.accumulate)
    set_seed(0)
    model, tokenizer = make_model(options, accelerator, degrees)
    rows = pack(Dataset.from_dict({"text": reference_texts()}), tokenizer, "text", options.block_size)
    rows = rows.train_test_split(24, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    loader, evaluation = (
        DataLoader(rows[split], options.batch_size, shuffle=split == "train", collate_fn=default_data_collator)
        for split in ("train", "test")
    )
    # The schedule is stepped once for each data-parallel rank, as accelerate does it.
    total = options.steps * accelerator.num_processes
    schedule = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(model, optimizer, loader, evaluation, schedule)

    losses: list[float] = []
    model.train()
    while len(losses) < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.gather(loss.detach()).mean().item())
            if len(losses) == options.steps:
                break
    accelerator.save_state(str(options.output_dir / "state"))

    model.eval()
    right = []
    for batch in evaluation:
        with torch.no_grad():
            predicted = model(input_ids=batch["input_ids"]).logits.argmax(-1)
        hits = (predicted[:, :-1] == batch["labels"][:, 1:]).float().mean(-1)
        right.append(accelerator.gather_for_metrics(hits).cpu())
    accuracy = torch.cat(right)
    model.save_pretrained(options.output_dir / "model")  # stock files; all ranks must call it
    if accelerator.is_main_process:
        summary = {"losses": losses, "eval_rows": len(accuracy), "accuracy": accuracy.mean().item()}
        (options.output_dir / "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last; {accuracy.mean():.1%} of the next "
            f"tokens are right; saved in {options.output_dir}",
            flush=True,
        )
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hub id or a local path; a small Llama with random weights by default")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs", "accelerate_loop"))
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of one optimizer step")
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--notebook_processes", type=int, help="start that many from here with notebook_launcher")
    parser.add_argument("--notebook_port", default="29500", help="where these processes meet")
    options = parser.parse_args()
    if options.notebook_processes:
        notebook_launcher(train, (options,), options.notebook_processes, use_port=options.notebook_port)
    else:
        train(options)


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
