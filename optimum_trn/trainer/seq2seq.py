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
        """As in Seq2SeqTrainer; ranks that share experts generate as long as the longest of them.

        Raises ValueError where data-parallel ranks would generate several sequences for each row.
        """
        if self.mesh is not None and self.accelerator.num_processes > 1 and not prediction_loss_only:
            self._refuse_several_sequences(gen_kwargs or getattr(self, "_gen_kwargs", {}))
        if self.parallel_config.expert_parallel_size > self.parallel_config.tensor_parallel_size:
            gen_kwargs = {**getattr(self, "_gen_kwargs", {}), "synced_gpus": True, **gen_kwargs}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)

    def _refuse_several_sequences(self, gen_kwargs: dict[str, Any]) -> None:
        config = gen_kwargs.get("generation_config") or self.model.generation_config
        count = gen_kwargs.get("num_return_sequences", config.num_return_sequences) or 1
        if self.args.predict_with_generate and count > 1:
            raise ValueError(
                f"num_return_sequences={count} with {self.accelerator.num_processes} data-parallel ranks: which of the "
                "gathered sequences belong to rows that only fill the last batch could not be told. Evaluate with "
                "num_return_sequences=1, or with tensor_parallel_size as large as the number of processes."
            )
