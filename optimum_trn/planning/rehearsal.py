"""One optimizer step of a model as the Trainer takes it, on whatever tensors the current device and modes make.

The same step runs on a core and, under FakeTensorMode, as a trace: patched modules, pipeline, recomputation, reduction
of gradients, sharded optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, Trainer, TrainingArguments

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.master_weights import with_master_weights
from optimum_trn.parallel.topology import launched_topology
from optimum_trn.patching import patch_model, pipeline_of
from optimum_trn.planning.architecture import ENCODERS
from optimum_trn.trainer.partition import partition_model
from optimum_trn.trainer.replication import Replication

CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForImageClassification",
)
"""Heads that a model type may be trained with, in the order in which they are looked for."""


@dataclass(frozen=True)
class Run:
    """How a step is taken, in the terms of TrainingArguments, of which these are the fields that change the stream.

    `micro_batches` rows of `batch_size` sequences each make a step; `optim` is a name of transformers' OptimizerNames.
    """

    batch_size: int
    sequence_length: int
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    optim: str = "adamw_torch_fused"
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5

    @classmethod
    def of(cls, args: TrainingArguments, sequence_length: int, dtype: torch.dtype = torch.float32) -> Run:
        """What the arguments of a Trainer say."""
        return cls(
            batch_size=args.per_device_train_batch_size,
            sequence_length=sequence_length,
            micro_batches=args.gradient_accumulation_steps,
            dtype=dtype,
            autocast=bool(args.bf16),
            optim=str(getattr(args.optim, "value", args.optim)),
            max_grad_norm=args.max_grad_norm or 0.0,
            learning_rate=args.learning_rate,
        )


class Rehearsal:
    """A model of `config` at a layout on this rank, with its optimizer; `step()` trains on batches of zeros.

    Raises `PlanError` or `MeshError` exactly where training would.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        parallel_config: ParallelConfig,
        run: Run,
        mesh: DeviceMesh | None,
        device: torch.device,
        optimizer: Any = None,
    ) -> None:
        self.run, self.device, self.mesh = run, device, mesh
        self._mark: Callable[[Iterable[Tensor | None]], None] | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = build_model(config, run.dtype, device)
        self.model.config.use_cache = False  # as the Trainer sets it
        patch_model(self.model, parallel_config, mesh)
        self.pipeline = pipeline_of(self.model)
        if mesh is not None and mesh["dp_shard"].size() > 1:
            world = torch.distributed.get_world_size()
            partition_model(self.model, mesh, launched_topology(world), device)
        self.model.train()
        self.optimizer: Any = optimizer(self.model.parameters()) if optimizer else optimizer_of(run, self.model)
        self.replication = None
        if mesh is not None and torch.distributed.get_world_size() > 1:
            self.replication = Replication(mesh, parallel_config)
            holder = SimpleNamespace(optimizer=self.optimizer)
            self.replication.attach([self.model], [holder], None)
            self.optimizer = holder.optimizer
        elif parallel_config.zero_1:
            self.optimizer = with_master_weights(self.optimizer, self.model)
        self.batch = batch_of(self.model, config, run, device)

    def expect(self, key: Any, specs: Any) -> None:
        """Know what arrives from the stage before, of micro-batches of that key: a trace gets no messages."""
        assert self.pipeline is not None
        for stage in range(self.pipeline.staged.stages.num_stages):
            self.pipeline.engine.layouts.known[stage, key] = specs

    def watch_gradients(self, mark: Callable[[Iterable[Tensor | None]], None]) -> None:
        """Have `mark` see every gradient, whole when it has been accumulated and reduced before it is used."""
        self._mark = mark
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda own: mark([own.grad]))

    def step(self) -> None:
        """All micro-batches forward and backward, the norm of the gradient, the optimizer."""
        run = self.run
        if self.pipeline is not None:
            batches = [dict(self.batch) for _ in range(run.micro_batches)]
            assert self.replication is not None
            with self.replication.no_sync():
                self.pipeline.step(batches, self._loss)
            with self.replication.reduced():
                pass
        else:
            for number in range(run.micro_batches):
                self._forward_backward(last=number == run.micro_batches - 1)
        if run.max_grad_norm:
            parameters = list(self.model.parameters())
            if self.replication is not None:
                self.replication.clip_grad_norm_(parameters, run.max_grad_norm, 2.0)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, run.max_grad_norm)
        if self._mark is not None:
            self._mark([parameter.grad for parameter in self.model.parameters()])
            for reducer in self.replication.reducers if self.replication is not None else ():
                self._mark(getattr(reducer, "gradients", {}).values())
        self.optimizer.step()
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def _forward_backward(self, last: bool) -> None:
        replication = self.replication
        if replication is None:
            self._loss(self.batch).backward()
        elif last:
            loss = self._loss(self.batch)
            with replication.reduced():
                loss.backward()
        else:
            with replication.no_sync():
                loss = self._loss(self.batch)
                with replication.reduced():
                    loss.backward()

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.run.autocast):
            loss: Tensor = self.model(**batch).loss
        return loss / self.run.micro_batches if self.run.micro_batches > 1 else loss


def optimizer_of(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that Trainer would make for the parameters of `model`."""
    parameters = list(model.parameters())
    if run.optim.startswith("adamw_torch"):  # what Trainer asks the model for besides is for others
        return torch.optim.AdamW(parameters, lr=run.learning_rate, fused=run.optim == "adamw_torch_fused" or None)
    arguments: Any = SimpleNamespace(
        optim=run.optim,
        optim_args=None,
        learning_rate=run.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)  # type: ignore[arg-type]
    optimizer: torch.optim.Optimizer = kind(parameters, **options)
    return optimizer


def build_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of the config with the head that it is trained with; `PlanError` where transformers knows none."""
    names = ("AutoModelForMaskedLM",) if config.model_type in ENCODERS else CLASSES
    for name in names:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            with torch.device(device):
                return auto.from_config(config, dtype=dtype)
    raise PlanError(
        f"{config.model_type!r} is no model that the trace knows how to train: none of {', '.join(CLASSES)} has it."
    )


def batch_of(model: Any, config: PretrainedConfig, run: Run, device: torch.device) -> dict[str, Tensor]:
    """A batch of zeros of the model's main input, and labels."""
    shape = (run.batch_size, run.sequence_length)
    name = getattr(model, "main_input_name", "input_ids")
    with torch.device(device):
        if name == "pixel_values":
            vision: Any = getattr(config, "vision_config", config)
            size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
            pixels = torch.zeros(run.batch_size, getattr(vision, "num_channels", 3), size, size, dtype=run.dtype)
            return {"pixel_values": pixels, "labels": torch.zeros(run.batch_size, dtype=torch.long)}
        tokens = torch.zeros(shape, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}
