"""The Trainer: Hugging Face's own, with a model that is sharded over NeuronCores."""

from .arguments import NeuronTrainingArguments
from .trainer import NeuronTrainer

__all__ = ["NeuronTrainer", "NeuronTrainingArguments"]
