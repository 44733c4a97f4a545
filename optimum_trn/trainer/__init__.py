"""The Trainer: Hugging Face's own, with a model that is sharded over NeuronCores."""

from .arguments import NeuronTrainingArguments
from .seq2seq import NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments
from .trainer import NeuronTrainer, NeuronTrainerMixin

__all__ = [
    "NeuronSeq2SeqTrainer",
    "NeuronSeq2SeqTrainingArguments",
    "NeuronTrainer",
    "NeuronTrainerMixin",
    "NeuronTrainingArguments",
]
