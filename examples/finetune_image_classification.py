"""Fine-tunes a vision transformer as a classifier of images, tensor-parallel: which digit is this?

    torchrun --nproc-per-node 2 examples/finetune_image_classification.py --tensor_parallel_size 2

needs no network: it draws digits in the font of Pillow, moved, scaled and on noise, and trains a small ViT from
scratch. With a model and a data set of your own:

    torchrun --nproc-per-node 3 examples/finetune_image_classification.py --tensor_parallel_size 3 \
        --model google/vit-base-patch16-224-in21k --dataset AI-Lab-Makerere/beans --label_column labels \
        --learning_rate 5e-5
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, load_dataset
from finetune_clm import EXPECTED_ERRORS
from finetune_text_classification import FineTuningArguments, accuracy
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoImageProcessor, HfArgumentParser, ViTConfig, ViTImageProcessor, set_seed

from optimum_trn import NeuronModelForImageClassification, NeuronTrainer

DIGITS = "0123456789"


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(default=None, metadata={"help": "A Hub id or a local path; a small ViT by default."})
    dataset: str | None = field(default=None, metadata={"help": "A Hub id. Default: digits that are drawn."})
    image_column: str = field(default="image", metadata={"help": "The column with the image."})
    label_column: str = field(default="label", metadata={"help": "The column with its class."})
    images: int = field(default=1000, metadata={"help": "How many digits are drawn."})
    image_size: int = field(default=32, metadata={"help": "Height and width, in pixels, for the model from scratch."})


@dataclass
class ImageArguments(FineTuningArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_image_classification")
    num_train_epochs: float = field(default=5)
    remove_unused_columns: bool = field(default=False)


def draw(digit: int, size: int, random: np.random.Generator) -> Image.Image:
    """A digit somewhere in the image, large or small, on a noisy ground."""
    image = Image.fromarray(random.integers(0, 100, (size, size, 3), dtype=np.uint8))
    font = ImageFont.load_default(size * random.uniform(0.8, 0.9))
    place = tuple(random.uniform(0, size * 0.15, 2))
    ImageDraw.Draw(image).text(place, DIGITS[digit], font=font, fill=tuple(random.integers(200, 256, 3).tolist()))
    return image


def read_images(example: ExampleArguments) -> Dataset:
    """A column of images and one of their classes."""
    if example.dataset is not None:
        return load_dataset(example.dataset, split="train")
    random = np.random.default_rng(0)
    labels = [number % len(DIGITS) for number in range(example.images)]
    images = [draw(label, example.image_size, random) for label in labels]
    rows = Dataset.from_dict({example.image_column: images, example.label_column: labels})
    return rows.cast_column(example.label_column, ClassLabel(names=list(DIGITS)))


def load_model(example: ExampleArguments, arguments: ImageArguments, names: list[str]) -> Any:
    """A classifier with a new head, its encoder pretrained or new, and what prepares its images."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if example.model is not None:
        model = NeuronModelForImageClassification.from_pretrained(
            example.model, arguments.parallel_config, dtype=torch.float32, num_labels=len(names), **labels
        )
        return model, AutoImageProcessor.from_pretrained(example.model)
    config = ViTConfig(
        image_size=example.image_size,
        patch_size=8,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(names),
        **labels,
    )
    size = {"height": example.image_size, "width": example.image_size}
    model = NeuronModelForImageClassification.from_config(config, arguments.parallel_config)
    return model, ViTImageProcessor(size=size)


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, ImageArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    rows = read_images(example)
    model, processor = load_model(example, arguments, rows.features[example.label_column].names)

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = [row[example.image_column].convert("RGB") for row in batch]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([row[example.label_column] for row in batch])}

    split = rows.train_test_split(0.2, seed=arguments.seed)
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=collate,
        processing_class=processor,
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        summary = {"losses": losses, "accuracy_before": before, "accuracy_after": after}
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"Accuracy {before:.3f} before, {after:.3f} after; saved in {arguments.output_dir}", flush=True)
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
