"""Fine-tunes a vision-language model, tensor-parallel, on images and a question about each: what colour is the square?

    torchrun --nproc-per-node 2 examples/finetune_vision_language.py --tensor_parallel_size 2

needs no network: it paints the images and trains a small Qwen2-VL from scratch. Its text and its vision tower are both
sharded; a tower without a plan would stay whole on every core and be named. `--model` takes a Hub id or a local path of
a Qwen2-VL, 2.5 or 3 instead, whose weights each core reads only its own part of.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, HfArgumentParser, Qwen2VLConfig, set_seed

from optimum_trn import NeuronModelForImageTextToText, NeuronTrainer, NeuronTrainingArguments
from optimum_trn.errors import (
    CheckpointError,
    MeshError,
    NeuronOutOfMemoryError,
    PlanError,
    UnsupportedModelError,
)
from optimum_trn.patching import state_of

COLOURS = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.8, 0.1),
    "blue": (0.1, 0.2, 1.0),
    "yellow": (1.0, 1.0, 0.1),
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
}
QUESTION = ("what", "colour", "is", "the", "square", "?")
WORDS = ("<pad>", "<image>", "<vision>", "</vision>", "<video>", *QUESTION, *COLOURS)
# What a user gets wrong: reported in one paragraph, on every rank.
EXPECTED_ERRORS = (CheckpointError, MeshError, NeuronOutOfMemoryError, PlanError, UnsupportedModelError, OSError)


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(
        default=None,
        metadata={"help": "A Hub id or a local path. Without it, a small Qwen2-VL is trained from scratch."},
    )
    train_images: int = field(default=192, metadata={"help": "How many images are painted to learn from."})
    eval_images: int = field(default=48, metadata={"help": "How many others are painted to be asked about."})
    image_size: int = field(default=32, metadata={"help": "Their height and width, in pixels."})


@dataclass
class FineTuningArguments(NeuronTrainingArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_vision_language")
    num_train_epochs: float = field(default=10)
    per_device_train_batch_size: int = field(default=16)
    per_device_eval_batch_size: int = field(default=16)
    learning_rate: float = field(default=3e-3)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=5)
    logging_steps: float = field(default=4)
    save_strategy: str = field(default="no")


def paint(colour: tuple[float, float, float], size: int, generator: torch.Generator) -> torch.Tensor:
    """A square of a colour somewhere on a grey ground with noise: (3, size, size), between 0 and 1."""
    image = 0.5 + 0.1 * torch.randn((3, size, size), generator=generator)
    side = size // 2
    top, left = (int(torch.randint(0, size - side + 1, (), generator=generator)) for _ in range(2))
    image[:, top : top + side, left : left + side] = torch.tensor(colour)[:, None, None]
    return image.clamp(0, 1)


def patches(image: torch.Tensor, vision: Any) -> tuple[torch.Tensor, list[int]]:
    """What Qwen2-VL's processor makes of one image: a row for each patch, and the numbers of patches in time and space.

    Patches that are merged into one token follow each other; a still image is as many equal frames as a patch is long.
    """
    size, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    channels, height, width = image.shape
    blocks = image.reshape(channels, height // size // merge, merge, size, width // size // merge, merge, size)
    rows = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
    grid = [1, height // size, width // size]
    return rows.reshape(grid[1] * grid[2], -1), grid


def examples(count: int, size: int, config: Any, seed: int) -> list[dict[str, torch.Tensor]]:
    """Images with a question and its answer, which alone is to be learnt."""
    generator = torch.Generator().manual_seed(seed)
    names, rows = list(COLOURS), []
    for index in range(count):
        name = names[index % len(names)]
        pixels, grid = patches(paint(COLOURS[name], size, generator), config.vision_config)
        tokens = grid[1] * grid[2] // config.vision_config.spatial_merge_size**2
        words = ["<vision>", *["<image>"] * tokens, "</vision>", *QUESTION, name]
        ids = torch.tensor([WORDS.index(word) for word in words])
        ids[1 : 1 + tokens] = config.image_token_id
        labels = torch.full_like(ids, -100)
        labels[-1] = ids[-1]
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": (ids == config.image_token_id).long(),
                "labels": labels,
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([grid]),
            }
        )
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Text row under row, and the patches of all images one after the other, as Qwen2-VL takes them."""
    together = {"pixel_values": torch.cat, "image_grid_thw": torch.cat}
    return {name: together.get(name, torch.stack)([row[name] for row in rows]) for name in rows[0]}


def tiny_config() -> Qwen2VLConfig:
    """A Qwen2-VL of two layers in each tower."""
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(WORDS),
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "pad_token_id": WORDS.index("<pad>"),
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 48,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=WORDS.index("<image>"),
        video_token_id=WORDS.index("<video>"),
        vision_start_token_id=WORDS.index("<vision>"),
        vision_end_token_id=WORDS.index("</vision>"),
    )
    return config


def best_words(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of all logits only what they say is kept for the metric."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The fraction of the questions that are answered right: each token is predicted by the one before it."""
    asked = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1][asked] == prediction.label_ids[:, 1:][asked]
    return {"accuracy": float(np.mean(right))}


def main() -> None:
    parser = HfArgumentParser((ExampleArguments, FineTuningArguments))
    example, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    if example.model is None:
        model = NeuronModelForImageTextToText.from_config(tiny_config(), arguments.parallel_config)
    else:
        model = NeuronModelForImageTextToText.from_pretrained(
            example.model, arguments.parallel_config, dtype=torch.float32
        )
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=examples(example.train_images, example.image_size, model.config, seed=1),
        eval_dataset=examples(example.eval_images, example.image_size, model.config, seed=2),
        data_collator=collate,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_words,
    )
    if trainer.is_world_process_zero() and (state := state_of(model)) is not None:
        print(state.report, flush=True)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        summary = {
            "model": example.model,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "world_size": arguments.world_size,
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "accuracy_before": before["eval_accuracy"],
            "accuracy_after": after["eval_accuracy"],
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Accuracy {before['eval_accuracy']:.3f} before, {after['eval_accuracy']:.3f} after, over "
            f"{example.eval_images} images; saved in {arguments.output_dir}",
            flush=True,
        )
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
