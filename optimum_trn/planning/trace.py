"""Traces one training step of one rank of any world on fake tensors: its stream, its memory over time, its FLOPs.

Nothing is computed and no weight exists: the real, patched modules run under FakeTensorMode with a fake process group,
so what is recorded is what the same step does on a core (device/record.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from optimum_trn.device import device_type
from optimum_trn.device.install import fakes_are_tensors
from optimum_trn.device.record import StepRecord
from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.granularity import Granularity, granularity_of
from optimum_trn.planning.hbm import HbmTimeline, hbm_timeline
from optimum_trn.planning.recording import Recording
from optimum_trn.planning.rehearsal import Rehearsal, Run, optimizer_of

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepTrace:
    """What one training step needs on one NeuronCore: simulated figures, from shapes alone.

    `memory_bytes` splits the peak by category (see hbm.py); `flops` counts a multiply-add as two operations, forward
    and backward, matrix products and attention only. `record` is the stream of the step, `hbm` its memory over time.
    """

    peak_hbm_bytes: int
    memory_bytes: dict[str, int]
    flops: int
    record: StepRecord = field(repr=False, compare=False)
    hbm: HbmTimeline = field(repr=False, compare=False)


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """A default process group of `world_size` ranks that exist only as shapes; raises MeshError inside a real one."""
    if dist.is_initialized():
        raise MeshError(
            f"Tracing pretends to be rank {rank} of {world_size}, but this process belongs to a process group of "
            f"{dist.get_world_size()} already: trace in a process of its own, started without torchrun."
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_training_step(
    config: PretrainedConfig,
    parallel_config: ParallelConfig,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerFactory | None = None,
    rank: int = 0,
    world_size: int | None = None,
    run: Run | None = None,
) -> StepTrace:
    """Trace the second step (optimizer states exist by then) of a model as `rank` of `world_size`.

    `batch_size` rows of `sequence_length` tokens are the micro-batch of one core, unless `run` says all of that;
    `world_size` defaults to one model replica. Raises PlanError or MeshError exactly where training would.
    """
    run = run or Run(
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        micro_batches=parallel_config.pipeline_parallel_size,
        max_grad_norm=0.0,
    )
    world = world_size or parallel_config.ranks_per_copy
    arriving = None
    if rank >= world // parallel_config.pipeline_parallel_size:  # no message says what the stage before sends
        first = replace(run, micro_batches=1)
        arriving = _sent_by_the_first_stage(config, parallel_config, first, world, optimizer)
    device = torch.device(device_type(), 0)
    _check_optimizer(run, optimizer, parallel_config, world)
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(world, rank))
        mesh = parallel_config.build_mesh()  # reads its own rank table, which a fake tensor would not have
        stack.enter_context(fakes_are_tensors())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        recording = stack.enter_context(Recording(device))
        rehearsal = Rehearsal(config, parallel_config, run, mesh, device, optimizer)
        if arriving is not None:
            rehearsal.expect(*arriving)
        rehearsal.watch_gradients(partial(recording.mark, "gradients"))
        rehearsal.step()
        recording.begin_step()
        rehearsal.step()
        recording.end_step()
        hbm = hbm_timeline(recording, rehearsal)
        recording.enabled = False
    peak = hbm.at_peak()
    return StepTrace(sum(peak.values()), peak, recording.flops, recording.record, hbm)


def _sent_by_the_first_stage(
    config: PretrainedConfig,
    parallel_config: ParallelConfig,
    run: Run,
    world_size: int,
    optimizer: OptimizerFactory | None,
) -> tuple[Any, Any]:
    """The shape of a micro-batch, and the tree of shapes that goes from one stage to the next, from a forward pass."""
    device = torch.device(device_type(), 0)
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(world_size, 0))
        mesh = parallel_config.build_mesh()
        stack.enter_context(fakes_are_tensors())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Recording(device))
        rehearsal = Rehearsal(config, parallel_config, run, mesh, device, optimizer)
        rehearsal.step()
        assert rehearsal.pipeline is not None
        (_, key), specs = next(iter(rehearsal.pipeline.engine.layouts.announced.items()))
        return key, specs


def _check_optimizer(run: Run, factory: OptimizerFactory | None, config: ParallelConfig, world_size: int) -> None:
    """What ZeRO-1 finds out by trying (granularity.py) can't be tried on fakes, which are all equal: see beforehand."""
    model = torch.nn.Linear(3, 2)
    optimizer = factory(model.parameters()) if factory else optimizer_of(run, model)
    shared = config.zero_1 and world_size > config.ranks_per_copy
    if shared and granularity_of(optimizer) is not Granularity.ELEMENT:
        raise PlanError(
            f"{type(optimizer).__name__} needs whole parameters, which ZeRO-1 gives it after trying it out on numbers; "
            "a trace has none. Trace with zero_1=False, or with an optimizer such as AdamW."
        )
