"""NeuronTrainer: transformers' Trainer on tensor-parallel models; its loop is untouched, only seams are overridden."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, _is_peft_model, unwrap_peft_model
from transformers.utils import logging

from ..checkpoint.adapters import save_adapters
from ..checkpoint.save import save_pretrained
from ..errors import MeshError, PlanError, UnsupportedModelError
from ..parallel import ParallelConfig
from ..parallel.master_weights import with_master_weights
from ..parallel.topology import Topology, launched_topology, placement_summary
from ..patching import patch_model, pipeline_of, state_of
from ..patching.adapters import adopt_adapters, parameter_counts, placements_of
from ..patching.state import set_mesh
from . import evaluation
from .accelerator import DataParallelAccelerator
from .fault_tolerance import FaultToleranceMixin
from .item_count import UseOf
from .memory_checkpoints import MemoryCheckpointsMixin
from .micro_batches import MicroBatches, deferred_backward
from .own_loss import show_logits
from .partition import partition_model, resolved
from .simulated_run import SimulatedRunMixin
from .static_shapes import StaticShapesMixin
from .trials import TrialEnded, pruned_together
from .trl import TRLMixin

logger = logging.get_logger(__name__)


class NeuronTrainerMixin(TRLMixin, FaultToleranceMixin, MemoryCheckpointsMixin, StaticShapesMixin, SimulatedRunMixin):
    """Makes any subclass of `transformers.Trainer` train sharded models: `class X(NeuronTrainerMixin, SFTTrainer)`.

    Takes what `Trainer` takes. `model` may be a stock model on the CPU, which is sharded here (with the weights of rank
    0), one from `NeuronModelForCausalLM.from_pretrained`, whose ranks never held more than their shards, or come from
    `model_init`; it may be a `PeftModel` of one of these. In one process it is the stock Trainer.

    Raises `MeshError` if the model was sharded at other degrees than `args` say, `PlanError` or `UnsupportedModelError`
    if it can't be sharded at them, and `CheckpointError` when a checkpoint can't be resumed.
    """

    model: Any
    lr_scheduler: Any
    gather_function: Any
    mesh: DeviceMesh | None = None
    _config: ParallelConfig | None = None
    _topology: Topology
    micro_batches: MicroBatches
    _divides_by_items: bool | None = None  # whether the loss makes use of num_items_in_batch; None: not known yet
    _step_rate: evaluation.StepRate | None = None  # of the evaluation whose metrics have not been reported yet

    # ---- Set-up -----------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Have accelerate count data-parallel ranks, and shard the model before anything moves it to the device."""
        super().create_accelerator_and_postprocess()
        self.micro_batches = MicroBatches()
        if self.args.world_size > 1:
            self._config = None
            config = self._config = resolved(self.parallel_config, self.model, self.args.world_size)
            state = None if self.model is None else state_of(self.model)
            self.mesh = None if state is None else state.mesh
            if self.mesh is None or self.mesh["dp_shard"].size() != config.axis_sizes(self.args.world_size)["dp_shard"]:
                self.mesh = config.build_mesh(self.args.device.type)
            assert self.mesh is not None
            DataParallelAccelerator.adopt(self.accelerator, self.mesh, config)
            self._topology = launched_topology(self.args.world_size)  # a collective
            logger.info(placement_summary(config, self._topology))
            self.gather_function = functools.partial(
                self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
            )
        self._refuse_of_trl()
        if self.model is not None:
            self._shard(self.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """Shard every model that `model_init` returns."""
        model = super().call_model_init(trial)
        self._shard(model)
        return model

    @property
    def parallel_config(self) -> ParallelConfig:
        """The degrees: those of the arguments, or of the model if the arguments are stock `TrainingArguments`."""
        if self._config is not None:
            return self._config
        config = getattr(self.args, "parallel_config", None)
        if config is None:
            state = None if self.model is None else state_of(self.model)
            config = ParallelConfig() if state is None else state.config
        return config

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share one copy of the model, so that all of them take part in saving and loading it."""
        shares_experts = self.parallel_config.expert_parallel_size > 1
        return self.mesh is not None and (
            shares_experts or any(self.mesh[axis].size() > 1 for axis in ("pp", "dp_shard", "cp", "tp"))
        )

    def _shard(self, model: Any) -> None:
        self._shard_layers(model)
        show_logits(model, type(self))
        if self.mesh is not None and self.mesh["dp_shard"].size() > 1:
            stock = unwrap_peft_model(model)
            set_mesh(stock, self.mesh)
            partition_model(stock, self.mesh, self._topology, self.args.device)
        if self.is_sharded and _is_peft_model(model):
            if any(config.is_prompt_learning for config in model.peft_config.values()):
                raise PlanError(
                    "Prompt learning is not supported on a sharded model. Use LoRA, or tensor_parallel_size=1."
                )
            adopt_adapters(model.get_base_model())
            if pipeline_of(model) is None:
                model.get_nb_trainable_parameters = functools.partial(parameter_counts, model)
            else:
                model.save_pretrained = functools.partial(save_adapters, model)

    def _shard_layers(self, model: Any) -> None:
        state = state_of(model)
        wanted = self.parallel_config
        same = (ParallelConfig() if state is None else state.config).of_model == wanted.of_model
        if same and (state is not None or not wanted.mics_partition_size):
            return
        if state is not None:
            raise MeshError(
                f"The model was loaded at {state.config}, but the training arguments say {wanted}: give both the same "
                f"degrees."
            )
        if not isinstance(unwrap_peft_model(model), PreTrainedModel):
            raise UnsupportedModelError(
                f"{type(model).__name__} is no transformers model, which no plan describes: {wanted} can't share it. "
                "Leave the degrees at 1 for data parallelism."
            )
        # As DistributedDataParallel does: ranks that initialised the model differently continue with rank 0's weights.
        for tensor in [*model.parameters(), *model.buffers()]:
            on_device = tensor.detach().to(self.args.device)
            dist.broadcast(on_device, src=0)
            tensor.data.copy_(on_device)
        stock = unwrap_peft_model(model)
        if _is_peft_model(model) and wanted.pipeline_parallel_size > 1:  # what no rank can count once stages are cut
            model.get_nb_trainable_parameters = functools.partial(tuple, model.get_nb_trainable_parameters())
        patch_model(stock, self.parallel_config, mesh=self.mesh)
        stock.save_pretrained = functools.partial(save_pretrained, stock)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in Trainer; one process, too, has float32 masters of bfloat16 weights, and states in the host's memory."""
        self.optimizer = super().create_optimizer(*args, **kwargs)
        elsewhere = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.mesh is None and self.parallel_config.zero_1 and not elsewhere:
            memory = self.parallel_config.optimizer_memory
            self.optimizer = with_master_weights(self.optimizer, self.model, memory)
        return self.optimizer

    # ---- Data and counting ------------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of one optimizer step, over the data-parallel ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        if self.mesh is not None and isinstance(sampler, BatchRebalanceSampler):
            # The one sampler of transformers that cuts by rank itself, and by that of the world.
            return BatchRebalanceSampler(
                lengths=sampler.lengths,
                effective_batch_size=sampler.effective_batch_size
                * self.accelerator.num_processes
                // self.args.world_size,
                dp_size=self.accelerator.num_processes,
                grad_accum=sampler.grad_accum,
                rank=self.accelerator.process_index,
                drop_last=sampler.drop_last,
            )
        return self._over_replicas(sampler)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        return self._over_replicas(super()._get_eval_sampler(eval_dataset))

    def _over_replicas(self, sampler: Sampler | None) -> Sampler | None:
        """Rows of about one length for a batch of all data-parallel ranks, which wait for the longest of them."""
        if self.mesh is not None and isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.accelerator.num_processes
        return sampler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share: transformers' 6 * tokens * parameters of the whole model, over the ranks that share it."""
        state = state_of(self.model)
        if state is None or not state.config.shares_model:
            return super().floating_point_ops(inputs)
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs:
            return 0
        embeddings = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        placements = placements_of(self.model)
        elsewhere = state.pipeline.staged.duplicates() if state.pipeline is not None else ()
        parameters = sum(
            torch.Size(placements[fqn].global_shape).numel() if fqn in placements else parameter.numel()
            for fqn, parameter in self.model.named_parameters()
            if id(parameter) not in embeddings and fqn not in elsewhere
        )
        sharing = state.config.tensor_parallel_size * state.config.context_parallel_size
        return 6 * inputs[name].numel() * parameters // sharing

    def get_num_trainable_parameters(self) -> int:
        """Of the whole model, wherever its parameters lie; in a pipeline a collective over its stages."""
        state = state_of(self.model)
        if state is None or state.pipeline is None or self.mesh is None:
            return parameter_counts(self.model)[0]
        elsewhere = state.pipeline.staged.duplicates()
        own = parameter_counts(self.model, without=elsewhere)[0]
        total = torch.tensor(own, device=self.args.device)
        dist.all_reduce(total, group=self.mesh.get_group("pp"))
        return int(total)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.is_sharded:  # Trainer's own line says what is on this rank
            logger.info(f"  Trainable parameters of the whole model = {self.get_num_trainable_parameters():,}")
        return prepared

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As in Trainer; a loss that is a mean by itself is not multiplied by the number of data-parallel ranks.

        Trainer multiplies what has been divided by the items of all ranks, to undo that gradients are averaged.  Many
        models accept `num_items_in_batch` and leave it alone, as BERT's do: with stock data parallelism their
        gradients grow with the number of ranks.  Here they are those of one process.
        """
        ranks = self.accelerator.num_processes
        if ranks == 1 or not self.args.average_tokens_across_devices or not isinstance(num_items_in_batch, Tensor):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._divides_by_items is None:
            with UseOf(num_items_in_batch) as use:
                result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self._divides_by_items = use.seen
        else:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._divides_by_items:
            return result
        return (result[0] / ranks, result[1]) if return_outputs else result / ranks

    # ---- Pipeline ---------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """As in Trainer; a pipeline takes the batches of one optimizer step together, as its micro-batches."""
        batches, num_items_in_batch = super().get_batch_samples(*args, **kwargs)
        self.micro_batches.begin(batches)
        return batches, num_items_in_batch

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As in Trainer; in a pipeline, the first micro-batch of an optimizer step trains on all of them."""
        pipeline = self._steps_together() or pipeline_of(self.model)
        if pipeline is None:
            return super().training_step(model, inputs, num_items_in_batch)
        step = super().training_step

        def compute_loss(batch: dict[str, Any]) -> Tensor:
            with deferred_backward(self.accelerator) as losses:
                step(model, dict(batch), num_items_in_batch)
            return losses[0]

        model.train()
        with self.accelerator.no_sync(model):
            loss = self.micro_batches.next_loss(pipeline, inputs, self._prepare_inputs, compute_loss)
        if not self.micro_batches.losses and isinstance(self.accelerator, DataParallelAccelerator):
            self.accelerator.reduce_gradients()
        return loss

    # ---- Evaluation -------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in Trainer; no row counts twice, whatever the class that this is mixed into gathers with."""
        if self.mesh is not None:
            every = self.gather_function == self.accelerator.gather  # as Seq2SeqTrainer, which drops nothing
            self.gather_function = functools.partial(
                evaluation.gathered, self.accelerator, self.args.eval_use_gather_object, every
            )
        with evaluation.batch_size_of_a_rank(self.args, self.accelerator):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        self._step_rate = evaluation.StepRate(
            metric_key_prefix,
            output.num_samples or 0,
            self.args.eval_batch_size,
            self.accelerator,
            self.args.world_size,
        )
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; evaluation steps per second are those of data-parallel ranks."""
        self._correct_step_rate(logs)
        super().log(logs, start_time)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        if self.hp_search_backend is None or trial is None or self.args.world_size == 1:
            return super()._report_to_hp_search(trial, step, metrics)
        with pruned_together():
            super()._report_to_hp_search(trial, step, metrics)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As in Trainer; steps per second are those of data-parallel ranks."""
        output = super().predict(*args, **kwargs)
        self._correct_step_rate(output.metrics or {})
        return output

    def _correct_step_rate(self, metrics: dict[str, float]) -> None:
        if self._step_rate is not None and self._step_rate.key in metrics:
            metrics[self._step_rate.key] = self._step_rate.corrected(metrics[self._step_rate.key])
            self._step_rate = None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate the real rows of the batch only, and report the loss of the global batch on every rank."""
        if self.mesh is None or self.accelerator.num_processes == 1:
            return self._predict(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        share = evaluation.share_of_batch(inputs, self.accelerator, self._parts_of_batch)
        inputs = evaluation.real_rows_of(inputs, share, self.label_names)
        loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        if loss is not None:
            generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
            is_mean = generates or self._evaluates_means
            loss = self._mean_over_replicas(loss, self._with_labels_that_count(inputs), share, is_mean)
        return loss, evaluation.filled_up(logits, share), evaluation.filled_up(labels, share)

    def _predict(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """`prediction_step` of Trainer, which in a pipeline runs where the outputs are; its results on all ranks."""
        pipeline = pipeline_of(self.model)
        if pipeline is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        step = super().prediction_step

        def compute(batch: Mapping[str, Any]) -> tuple[Any, bool | None]:
            result = step(model, dict(batch), prediction_loss_only, ignore_keys, **gen_kwargs)
            return result, self._divides_by_items  # which only the last stage sees

        result: tuple[Tensor | None, Any, Any]
        result, self._divides_by_items = pipeline.evaluate(self._prepare_inputs(inputs), compute)
        return result

    def _mean_over_replicas(
        self, loss: Tensor, inputs: dict[str, Any], share: evaluation.Share, is_mean: bool
    ) -> Tensor:
        """The loss of the global batch from those of its shares."""
        counts = self._divides_by_items is not False and not is_mean  # of a step that calls without the count
        local_items = self._get_num_items_in_batch([inputs], self.args.device) if counts else None
        if local_items is not None and self.args.average_tokens_across_devices:
            # Each is already the sum over its tokens, over the mean number of tokens of a rank.
            return self.accelerator.reduce(loss, "mean")
        weight = evaluation.weight_of(inputs, share, self.label_names) if local_items is None else local_items
        weight = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        total, items = self.accelerator.reduce(torch.stack([torch.where(weight > 0, loss * weight, 0.0), weight]))
        return total / items

    # ---- Saving and resuming: see checkpoints.py ---------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in Trainer; see `MemoryCheckpointsMixin.train` for how it resumes."""
        try:
            output = super().train(*args, **kwargs)
        except TrialEnded:
            return TrainOutput(self.state.global_step, math.nan, {})
        if isinstance(self.accelerator, DataParallelAccelerator):
            self.accelerator.replication.settle()  # or a rank may leave while others wait for its parameters
        return output


class NeuronTrainer(NeuronTrainerMixin, Trainer):
    """`transformers.Trainer` for models that are sharded over NeuronCores, data-parallel over what is left of them."""
