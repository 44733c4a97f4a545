"""Supervised fine-tuning on chats with TRL, tensor-parallel: only the answers are learned.

    torchrun --nproc-per-node 2 examples/finetune_chat.py --tensor_parallel_size 2

needs no network (`pip install "optimum_trn[trl]"`): it trains the small model of finetune_clm.py, gives it a chat
template, and teaches it to answer questions about Python's reference. With a model and chats of your own, packed:

    torchrun --nproc-per-node 3 examples/finetune_chat.py --tensor_parallel_size 3 --packing \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset trl-lib/Capybara --learning_rate 2e-5
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset, load_dataset
from finetune_clm import EXPECTED_ERRORS, ExampleArguments, FineTuningArguments, make_model_from_scratch
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase, set_seed

from optimum_trn import NeuronModelForCausalLM, NeuronSFTConfig, NeuronSFTTrainer

# The marks of "generation" tell TRL which tokens are the assistant's.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass
class ChatArguments(NeuronSFTConfig):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_chat")
    max_steps: int = field(default=40)
    per_device_train_batch_size: int = field(default=8)
    learning_rate: float = field(default=1e-3)
    max_length: int | None = field(default=128)
    assistant_only_loss: bool = field(default=True)
    bf16: bool = field(default=False)
    logging_steps: float = field(default=1)
    save_strategy: str = field(default="no")


def read_chats(example: ExampleArguments) -> Dataset:
    """Conversations in the column `messages`; a question about each topic of Python's reference by default."""
    if example.dataset is not None:
        return load_dataset(example.dataset, example.dataset_config, split=example.dataset_split)
    answers = {name: " ".join(text.split())[:240] for name, text in sorted(topics.items())}
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"What does Python's reference say about {name}?"},
                    {"role": "assistant", "content": answer},
                ]
            }
            for name, answer in answers.items()
        ]
    )


def make_chat_model(example: ExampleArguments, arguments: ChatArguments) -> str:
    """The small model of finetune_clm.py, whose tokenizer learns what a chat looks like; returns where it is."""
    own = FineTuningArguments(output_dir=arguments.output_dir, tensor_parallel_size=arguments.tensor_parallel_size)
    directory = make_model_from_scratch(example, own)
    with arguments.main_process_first(desc="chat template"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = CHAT_TEMPLATE
        if arguments.process_index == 0:
            tokenizer.save_pretrained(directory)
    return directory


def answer(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """What the sharded model says; all ranks must call it."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(
            **inputs.to(model.device), max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, ChatArguments)).parse_args_into_dataclasses()
    name = example.model or make_chat_model(example, arguments)
    set_seed(arguments.seed)
    chats = read_chats(example).train_test_split(example.eval_rows, seed=arguments.seed)
    trainer = NeuronSFTTrainer(
        model=NeuronModelForCausalLM.from_pretrained(name, arguments.parallel_config, dtype=torch.float32),
        args=arguments,
        train_dataset=chats["train"],
        eval_dataset=chats["test"],
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    says = answer(trainer.model.eval(), trainer.processing_class, "What does Python's reference say about lambda?")
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        summary = {"losses": losses, "eval_loss_before": before, "eval_loss_after": after, "answer": says}
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"Evaluation loss {before:.4f} before, {after:.4f} after. About lambda it says: {says!r}", flush=True)
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
