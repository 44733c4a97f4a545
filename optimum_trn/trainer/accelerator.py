"""An Accelerator that counts data-parallel ranks: the tensor-parallel ranks of one replica are one process to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.operations import gather_object, recursively_apply
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers.trainer_utils import seed_worker

from ..checkpoint.spans import IdleSpans
from ..parallel import ParallelConfig
from ..parallel.mesh import axis_of
from .accelerator_state import StateMixin
from .replication import Replication
from .schedule import DataParallelScheduler
from .stream import DataParallelStream


class DataParallelAccelerator(StateMixin):
    """Sees a ("dp", "tp") mesh as its data-parallel ranks, so that everything counted over processes counts once.

    `num_processes` and `process_index` are those of the "dp" axis. Loaders give every data-parallel rank rows of its
    own and each of its tensor-parallel ranks the same; `gather`, `gather_for_metrics` and `reduce` run over "dp";
    models that `prepare` is given are replicated over "dp" (see replication.py), and `clip_grad_norm_` counts each of
    their parameters once.
    `is_main_process` and `wait_for_everyone` still mean the world. accelerate's own ParallelismConfig can't say this:
    it refuses replicas of a tensor-parallel model (huggingface/accelerate#3876).
    """

    mesh: DeviceMesh
    replication: Replication
    spans: IdleSpans | None = None
    """What is told when gradients use the links; memory checkpoints travel in between."""

    @classmethod
    def adopt(cls, accelerator: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
        """Turn an accelerator into one that counts the data-parallel ranks of `mesh`, on the instance.

        Raises ValueError where these would get different numbers of batches.
        """
        if not accelerator.even_batches and axis_of(mesh, "dp").size() > 1:
            raise ValueError(
                f"even_batches=False: with {mesh['dp'].size()} data-parallel ranks, some would have a batch less and "
                "the others wait for their gradients. Leave it True, or set dataloader_drop_last=True."
            )
        accelerator.__class__ = type(cls.__name__, (cls, type(accelerator)), {})
        accelerator.mesh = mesh
        accelerator.replication = Replication(mesh, config)

    @property
    def num_processes(self) -> int:
        return axis_of(self.mesh, "dp").size()

    @property
    def process_index(self) -> int:
        return axis_of(self.mesh, "dp").get_local_rank()

    @property
    def is_last_process(self) -> bool:
        return self.state.process_index == self.state.num_processes - 1

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate; models among `args` are then replicated, and the optimizers sharded with `zero_1`."""
        prepared = super().prepare(*args, **kwargs)
        models = [model for model in args if isinstance(model, nn.Module)]
        if models or any(isinstance(item, torch.optim.Optimizer) for item in args):
            results = prepared if isinstance(prepared, tuple) else (prepared,)
            compiled = any(isinstance(item, nn.Module) and _is_compiled(item) for item in results)
            models = [*self.replication.models, *models]
            self.replication.attach(models, self._optimizers, self.ddp_handler, compiled)
        return prepared

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Placement, autocast and compilation as in accelerate, without DistributedDataParallel."""
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in accelerate, stepped once for each data-parallel rank."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, DataParallelScheduler) or not isinstance(prepared, AcceleratedScheduler):
            return prepared
        own = DataParallelScheduler(prepared, self.num_processes)
        own._is_accelerate_prepared = True  # type: ignore[attr-defined]
        self._schedulers[self._schedulers.index(prepared)] = own
        return own

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, gradients accumulate on each rank, as with DistributedDataParallel."""
        with self.replication.no_sync():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As in accelerate; on return the gradients are reduced over the data-parallel ranks, outside `no_sync`."""
        with self._links_busy(), self.replication.reduced():
            super().backward(loss, **kwargs)

    def reduce_gradients(self) -> None:
        """Reduce the gradients that a pipeline has accumulated, over the data-parallel ranks."""
        with self._links_busy(), self.replication.reduced():
            pass

    def _links_busy(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.spans is None else self.spans.busy()

    def free_memory(self, *objects: Any) -> Any:
        """As in accelerate; gradients are no longer reduced."""
        self.replication.close()
        return super().free_memory(*objects)

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader:
        """A loader of this data-parallel rank's share; see `DataParallelStream` for iterable and dispatched ones."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        init = data_loader.worker_init_fn
        if isinstance(init, functools.partial) and init.func is seed_worker:
            # Trainer seeds workers by world rank: tensor-parallel ranks would augment the same rows differently.
            data_loader.worker_init_fn = functools.partial(init.func, **{**init.keywords, "rank": self.process_index})
        is_iterable = isinstance(data_loader.dataset, IterableDataset)
        dispatch = is_iterable if self.dispatch_batches is None else self.dispatch_batches
        if not is_iterable and not dispatch:
            prepared: Any = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
            if self._draws_from_global_generator(data_loader):
                prepared.rng_types = [
                    "torch"
                ]  # all ranks draw rank 0's order, even where their generators drifted apart
            return prepared

        stream = DataParallelStream(
            data_loader,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=self.split_batches,
            dispatch=dispatch,
            data_seed=self.dataloader_config.data_seed,
        )
        place = self.device_placement if device_placement is None else device_placement
        loader: Any = DataLoaderShard(
            stream,
            device=self.device if place else None,
            batch_size=stream.batch_size,
            collate_fn=data_loader.collate_fn,
            pin_memory=data_loader.pin_memory,
            _non_blocking=self.non_blocking,
        )
        stream.loader = loader
        loader._is_accelerate_prepared = True
        self._dataloaders.append(loader)
        return loader

    def _draws_from_global_generator(self, data_loader: DataLoader) -> bool:
        """Whether the order of the rows is drawn from the CPU generator, which accelerate leaves alone."""
        sampler: Any = getattr(data_loader.batch_sampler, "sampler", data_loader.sampler)
        is_seedable = self.use_seedable_sampler and isinstance(sampler, RandomSampler)
        return getattr(sampler, "generator", False) is None and not is_seedable

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of the data-parallel ranks along dimension 0 (scalars become one-dimensional)."""

        def gather_one(local: Tensor) -> Tensor:
            local = local[None] if local.ndim == 0 else local
            gathered = local.new_empty((self.num_processes * local.shape[0], *local.shape[1:]))
            dist.all_gather_into_tensor(gathered, local.contiguous(), group=self.mesh.get_group("dp"))
            return gathered

        return tensor if self.num_processes == 1 else recursively_apply(gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` without the rows that only fill the last batch; objects are pickled, tensors are not."""
        if not use_gather_object and _holds_only_tensors(input_data):
            return super().gather_for_metrics(input_data)
        # Each rank hands in a list of one, so that the gathered list is by world rank; "pp" is the outermost axis, and
        # those within "dp" are neighbours.
        every = gather_object([input_data])
        one_stage = every[: len(every) // self.mesh["pp"].size()]
        per_rank = one_stage[:: len(one_stage) // self.num_processes]
        data: Any = per_rank
        if isinstance(input_data, Tensor):
            data = torch.cat([local.to(input_data.device) for local in per_rank])
        elif isinstance(input_data, list | tuple):
            data = [row for rows in per_rank for row in rows]
        state = self.gradient_state
        return data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The "sum" or "mean" of the data-parallel ranks' tensors, times `scale`."""

        def reduce_one(local: Tensor) -> Tensor:
            total = local.clone()
            if self.num_processes > 1:
                dist.all_reduce(total, group=self.mesh.get_group("dp"))
            return total * (scale / self.num_processes if reduction == "mean" else scale)

        return recursively_apply(reduce_one, tensor, error_on_other_type=True)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; return the norm before."""
        self.unscale_gradients()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return self.replication.clip_grad_norm_(parameters, max_norm, norm_type)


def _holds_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _is_compiled(model: nn.Module) -> bool:
    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in model.modules()
    )
