"""The Trainer of sequence-to-sequence models, which evaluates what a sharded model generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from .arguments import NeuronTrainingArguments
from .trainer import NeuronTrainerMixin


@dataclass
class NeuronSeq2SeqTrainingArguments(NeuronTrainingArguments, Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` and the degrees of parallelism. Raises as `NeuronTrainingArguments`."""


class NeuronSeq2SeqTrainer(NeuronTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` for sharded models; the ranks of one copy generate the same tokens."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None]:
        """As in Seq2SeqTrainer; ranks that share experts generate as long as the longest of them."""
        if self.parallel_config.expert_parallel_size > self.parallel_config.tensor_parallel_size:
            gen_kwargs = {**getattr(self, "_gen_kwargs", {}), "synced_gpus": True, **gen_kwargs}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
