"""Traces one training step of one rank on fake tensors: its peak memory and its floating point operations.

Nothing is computed and no weight exists: the real, patched modules run under FakeTensorMode with a fake process group,
so what is counted is what the same step does on a core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM, PretrainedConfig

from optimum_trn.device import device_type
from optimum_trn.errors import MeshError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model

# torch's counter knows the accelerators' fused attention kernels, not the CPU's, which is the one the device runs.
CPU_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *args, out_shape, **kwargs: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *args, out_shape, **kwargs: sdpa_backward_flop_count(grad, query, key, value)
    ),
}

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepTrace:
    """What one training step needs on one NeuronCore: simulated figures, from shapes alone.

    `memory_bytes` splits the peak by category (parameters, gradients, optimizer states, activations, ...);
    `flops` counts a multiply-add as two operations, forward and backward, matrix products and attention only.
    """

    peak_hbm_bytes: int
    memory_bytes: dict[str, int]
    flops: int


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
    optimizer: OptimizerFactory = lambda parameters: torch.optim.AdamW(parameters, fused=True),
    rank: int = 0,
) -> StepTrace:
    """Trace the second step (optimizer states exist by then) of a causal language model as `rank` of one model replica.

    `batch_size` rows of `sequence_length` tokens are the micro-batch of one core. Raises PlanError or MeshError exactly
    where training would.
    """
    device = torch.device(device_type(), 0)
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(parallel_config.tensor_parallel_size, rank))
        mesh = parallel_config.build_mesh()  # reads its own rank table, which a fake tensor would not have
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model.config.use_cache = False  # as the Trainer sets it
            tokens = torch.zeros(batch_size, sequence_length, dtype=torch.long)
        patch_model(model, parallel_config, mesh)
        model.train()
        stepper = optimizer(model.parameters())

        def step() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            stepper.step()
            stepper.zero_grad()

        step()
        memory, flops = MemTracker(), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION_FLOPS)
        memory.track_external(model, stepper, tokens)
        with memory, flops:
            step()
    peak = memory.get_tracker_snapshot("peak")[device]
    categories = {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}
    total = categories.pop("Total")
    return StepTrace(peak_hbm_bytes=total, memory_bytes=categories, flops=flops.get_total_flops())
