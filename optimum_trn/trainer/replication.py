"""What data-parallel ranks do for the models that they train together: equal weights, gradients, sharded optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.dataclasses import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..parallel import ParallelConfig, Placement
from ..parallel.grad_norm import Gradient, clip_, gradients_of, total_norm
from ..parallel.gradients import AllReduced, GradientReducer, Scattered
from ..parallel.granularity import Granularity, granularity_of
from ..parallel.mics import WITHOUT_DTENSORS, partitioned, partitioned_gradients, shard_group, without_replicas
from ..parallel.whole_parameters import Shards, WholeParameters
from ..parallel.zero1 import LOW_PRECISION, Zero1Optimizer
from ..patching import pipeline_of, state_of
from ..patching.adapters import placements_of
from ..patching.expert_parallel import ExpertShards


class Replication:
    """The gradients and optimizer states of models that are replicated over the "dp" and "cp" axes of a mesh.

    Gradients are averaged over both: a loss over tokens of several context-parallel ranks is scaled for that where
    they are summed (see parallel/context.py).

    With `zero_1` every optimizer is cut over these ranks; else every rank has the whole, and the reduced gradients.
    Experts that are shared out see the tokens of all ranks of their group already: their gradients are summed over the
    ranks with the same experts only, and divided as the others are.
    """

    def __init__(self, mesh: DeviceMesh, config: ParallelConfig) -> None:
        self.mesh = mesh
        self.config = config
        self.group = mesh.get_group("dp_cp")
        self.num_ranks = dist.get_world_size(self.group)
        self.models: tuple[nn.Module, ...] = ()
        self.reducers: list[GradientReducer] = []
        self.placements: dict[str, Placement] = {}
        self._names: dict[int, str] = {}
        self._duplicates: set[str] = set()  # parameters that an earlier rank of the pipeline has, too
        self._buffers: list[Any] = []
        self._partitioned: list[nn.Module] = []
        self._sharded_optimizers: list[Zero1Optimizer] = []
        self._experts: ExpertShards | None = None
        self._expert_names: set[str] = set()

    def attach(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        options: DistributedDataParallelKwargs | None,
        compiled: bool = False,
    ) -> None:
        """Take on `models` and the prepared `optimizers` (accelerate's wrappers) of their parameters.

        Of the `options` for DistributedDataParallel, the size of buckets and whether to keep buffers equal count; what
        else there is to choose is not needed here, but for a communication hook, which raises ValueError.
        """
        self.close()
        self.models = tuple(models)
        options = options or DistributedDataParallelKwargs()
        if options.comm_hook is not DDPCommunicationHookType.NO:
            raise ValueError(f"The communication hook {options.comm_hook} of DistributedDataParallel is not supported.")
        parameters = self._name(models)
        capacity = int(options.bucket_cap_mb * 2**20)
        if self.num_ranks > 1:
            self._make_equal(models)
            if options.broadcast_buffers:
                self._keep_buffers_equal(models)
        self._partitioned = [inner for inner in map(partitioned, models) if inner is not None]
        sharded = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
        for accelerated in optimizers:
            needs_whole = self._needs_whole_parameters(accelerated.optimizer)
            optimizer = self._sharded(accelerated.optimizer, parameters, capacity)
            if optimizer is not None:
                accelerated.optimizer = optimizer
                # A compiled forward pass takes the parameters that it is given: it does not wait for them.
                optimizer.overlaps = not compiled
                self._sharded_optimizers.append(optimizer)
                self.reducers += optimizer.reducers
                sharded |= optimizer.parameters.keys()
            if needs_whole:
                self._give_whole_parameters(accelerated)
        rest = {name: parameter for name, parameter in parameters.items() if name not in sharded}
        for family, group in self._families(rest):
            if family and self.num_ranks > 1:
                self.reducers.append(AllReduced(family, group, self.num_ranks, capacity))

    def _families(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> list[tuple[dict[str, nn.Parameter], dist.ProcessGroup]]:
        """The parameters, and the experts among them if they are shared out, each with the ranks that hold the same."""
        common = {name: parameter for name, parameter in parameters.items() if name not in self._expert_names}
        experts = {name: parameter for name, parameter in parameters.items() if name in self._expert_names}
        others = [] if self._experts is None else [(experts, self._experts.replicas)]
        return [(common, self.group), *others]

    def _name(self, models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
        """All parameters of `models` by name, with the number of the model before it if there are several."""
        parameters: dict[str, nn.Parameter] = {}
        self.placements, self._duplicates, self._expert_names = {}, set(), set()
        for number, model in enumerate(models):
            prefix = f"{number}." if len(models) > 1 else ""
            parameters |= {prefix + name: parameter for name, parameter in model.named_parameters()}
            self.placements |= {prefix + name: placement for name, placement in placements_of(model).items()}
            state, pipeline = state_of(model), pipeline_of(model)
            if state is not None and state.experts is not None:
                self._experts = state.experts
                shared_out = set(map(id, state.experts.placements.values()))
                self._expert_names |= {
                    prefix + name for name, placement in placements_of(model).items() if id(placement) in shared_out
                }
            if pipeline is not None:
                self._duplicates |= {prefix + name for name in pipeline.staged.duplicates()}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        return parameters

    def _make_equal(self, models: Sequence[nn.Module]) -> None:
        """Continue with the weights of the first rank, as DistributedDataParallel does."""
        with torch.no_grad():
            for model in models:
                if partitioned(model) is not None:
                    continue
                for tensor in [*model.parameters(), *model.buffers()]:
                    is_expert = self._names.get(id(tensor)) in self._expert_names and self._experts is not None
                    group = self._experts.replicas if is_expert else self.group  # type: ignore[union-attr]
                    dist.broadcast(tensor, group=group, group_src=0)

    def _keep_buffers_equal(self, models: Sequence[nn.Module]) -> None:
        """Before every forward in training, take the first rank's running statistics, as DistributedDataParallel does.

        Buffers that are not saved are constants, and are left out.
        """

        def take(model: nn.Module, inputs: Any) -> None:
            if model.training and torch.is_grad_enabled():
                for buffer in _saved_buffers(model):
                    dist.broadcast(buffer, group=self.group, group_src=0)

        self._buffers = [model.register_forward_pre_hook(take) for model in models if _saved_buffers(model)]

    def _needs_whole_parameters(self, optimizer: Any) -> bool:
        """Whether an optimizer would take shards for parameters; ValueError, by its name, if it can't be helped."""
        sizes = {
            "tensor_parallel_size": self.mesh["tp"].size(),
            "expert_parallel_size": self.config.expert_parallel_size,
            "mics_partition_size": self.mesh["dp_shard"].size(),
        }
        shards = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        if not shards or isinstance(optimizer, Zero1Optimizer | WholeParameters):
            return False
        granularity = granularity_of(optimizer)
        if granularity is Granularity.MODEL:
            raise ValueError(
                f"{type(optimizer).__name__} updates a parameter by what it knows of others, or could not be tried on "
                f"small ones: it can't train parameters that {shards} shards. Use an optimizer that updates each "
                "parameter by itself, such as AdamW or Adafactor, or leave the parameters whole."
            )
        return granularity is Granularity.PARAMETER or (bool(self._partitioned) and type(optimizer) in WITHOUT_DTENSORS)

    def _give_whole_parameters(self, accelerated: Any) -> None:
        """Have an optimizer update whole parameters, of which this rank has shards (see whole_parameters.py)."""
        optimizer = accelerated.optimizer
        if isinstance(optimizer, Zero1Optimizer):
            names = {id(part): span.name for span, part in optimizer.parts.items()}
        else:
            names = self._names
        shards = {key: self._shards_of(name) for key, name in names.items() if name in self.placements}
        if isinstance(optimizer, Zero1Optimizer):
            optimizer.optimizer = WholeParameters(optimizer.optimizer, shards)
        else:
            accelerated.optimizer = WholeParameters(optimizer, shards)

    def _shards_of(self, name: str) -> Shards:
        if name in self._expert_names and self._experts is not None:
            return Shards(self.placements[name], self._experts.group.process_group, self._experts.group.rank)
        group = self.mesh.get_group("tp")
        return Shards(self.placements[name], group, dist.get_rank(group))

    def _sharded(self, optimizer: Any, parameters: Mapping[str, nn.Parameter], capacity: int) -> Zero1Optimizer | None:
        if isinstance(optimizer, Zero1Optimizer):  # of an earlier call of Trainer.train
            return optimizer
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        low_precision = any(parameter.dtype in LOW_PRECISION for parameter in held)
        has_copies = low_precision or self.config.optimizer_offload
        if self._partitioned or not self.config.zero_1 or (self.num_ranks == 1 and not has_copies):
            return None
        if any(id(parameter) not in self._names for parameter in held):
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters of no model that was prepared with it. Make them part of "
                "the model, or set zero_1=False."
            )
        wanted = {id(parameter) for parameter in held} | {id(p) for p in parameters.values() if p.requires_grad}
        shared = {name: parameter for name, parameter in parameters.items() if id(parameter) in wanted}
        (common, group), *others = self._families(shared)
        memory = self.config.optimizer_memory
        return Zero1Optimizer(optimizer, common, group, self.num_ranks, capacity, others, memory)

    # ---- Around a backward pass -------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate, on each rank its own."""
        with ExitStack() as stack:
            for reducer in self.reducers:
                stack.enter_context(reducer.no_sync())
            for model in self._partitioned:
                stack.enter_context(without_replicas(model))
            yield

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Around a backward pass: afterwards its gradients are reduced, unless inside `no_sync`."""
        for reducer in self.reducers:
            reducer.begin()
        yield
        for reducer in self.reducers:
            reducer.finish()

    def close(self) -> None:
        """Let go of all models."""
        for reducer in self.reducers:
            reducer.close()
        for handle in self._buffers:
            handle.remove()
        self.settle()
        self.models, self.reducers, self._buffers, self._partitioned = (), [], [], []
        self._sharded_optimizers = []

    def settle(self) -> None:
        """Wait until the parameters of all models are those of the last optimizer step."""
        for optimizer in self._sharded_optimizers:
            optimizer.settle()

    # ---- The norm of the gradients ----------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; return the norm before."""
        wanted = [(self._names.get(id(parameter), ""), parameter) for parameter in parameters]
        parts: list[Gradient] = []
        for reducer in self.reducers:
            if isinstance(reducer, Scattered):
                shapes = {name: tuple(parameter.shape) for name, parameter in wanted if name in reducer.parameters}
                parts += [
                    Gradient(span.name, grad, shapes[span.name], span.start)
                    for span, grad in reducer.gradients.items()
                    if span.name in shapes
                ]
                wanted = [(name, parameter) for name, parameter in wanted if name not in shapes]
        shards = partitioned_gradients(wanted)
        sharded = {shard.name for shard in shards}
        whole = gradients_of((name, parameter) for name, parameter in wanted if name not in sharded)
        group = self.mesh.get_group("tp") if self.mesh["tp"].size() > 1 else None
        stages = [self.mesh.get_group("pp")] if self.mesh["pp"].size() > 1 else []
        scattered = any(isinstance(reducer, Scattered) for reducer in self.reducers)
        families = [
            (self._common(whole), group, stages, True),
            (self._common(parts), group, [self.group, *stages], scattered),
            *((shards, group, [shard_group(model), *stages], True) for model in self._partitioned[:1]),
        ]
        if self._experts is not None:
            ranks, replicas = self._experts.group.process_group, self._experts.replicas
            families += [
                (self._of_experts(whole), ranks, stages, not scattered),
                (self._of_experts(parts), ranks, [replicas, *stages], scattered),
            ]
        dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
        norms = [
            total_norm(self._once(gradients), self.placements, over, norm_type, partitions, dtype)
            for gradients, over, partitions, exists in families
            if exists
        ]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[-1]) for norm in norms]), norm_type)
        if not math.isinf(max_norm):
            clip_([*whole, *parts, *shards], total, max_norm)
        return total

    def _common(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        return [gradient for gradient in gradients if gradient.name not in self._expert_names]

    def _of_experts(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        return [gradient for gradient in gradients if gradient.name in self._expert_names]

    def _once(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        return [gradient for gradient in gradients if gradient.name not in self._duplicates]


def _saved_buffers(model: nn.Module) -> list[Tensor]:
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
