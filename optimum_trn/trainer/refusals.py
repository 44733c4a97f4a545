"""The values of training arguments that can't be honoured here, each with its reason and a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..device import device_type
from ..parallel.mesh import world_size


@dataclass(frozen=True)
class Refusal:
    """One argument, the circumstances in which it is refused (for the table in the docs, and as a test), and why."""

    argument: str
    where: str
    applies: Callable[[Any], bool]
    reason: str


def on_core(args: Any) -> bool:
    """Whether the device is a NeuronCore."""
    return device_type() == "neuron" and not args.use_cpu


def several(args: Any) -> bool:
    """Whether several processes train together."""
    return world_size() > 1


def survives(args: Any) -> bool:
    """Whether training goes on when processes are lost."""
    return getattr(args, "fault_tolerance", None) is not None


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: survives(args) and getattr(args, name) > 1


WHOLE_LAYERS = "pipelines of whole layers are rebuilt when nodes are lost. Leave it at 1: nodes share the layers."
FLOAT16 = "NeuronCores train in bfloat16 or float32"
REFUSALS = (
    *(
        Refusal(name, "above 1, with fault_tolerance", _above_one(name), WHOLE_LAYERS)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "expert_parallel_size",
        )
    ),
    *(
        Refusal(
            name,
            "with fault_tolerance",
            survives,
            "what is computed again would draw other random numbers than the layers that it repeats. Leave it unset.",
        )
        for name in ("gradient_checkpointing", "activation_checkpointing", "recompute")
    ),
    *(
        Refusal(name, "with fault_tolerance", survives, f"{reason} Leave it unset.")
        for name, reason in (
            ("mics_partition_size", "it would shard what nodes must be able to hand on."),
            ("fsdp", "it would shard what nodes must be able to hand on."),
            ("deepspeed", "it would shard what nodes must be able to hand on."),
            ("torch_compile", "the layers of a process change, and a compiled model keeps those that it had."),
            ("load_best_model_at_end", "only the first of the processes knows the checkpoints, and it may be lost."),
            ("auto_find_batch_size", "processes would start again at different steps."),
            ("enable_jit_checkpoint", "the signal reaches every process at a step of its own."),
        )
    ),
    Refusal("fp16", "on NeuronCores", on_core, f"{FLOAT16}; set bf16=True instead."),
    Refusal("fp16_full_eval", "on NeuronCores", on_core, f"{FLOAT16}; set bf16_full_eval=True instead."),
    Refusal(
        "use_liger_kernel",
        "on NeuronCores",
        on_core,
        "Liger's kernels are written in Triton for GPUs. Leave it unset: cross-entropy on a sharded vocabulary, which "
        "never gathers the logits, comes with tensor_parallel_size.",
    ),
    Refusal(
        "auto_find_batch_size",
        "with several processes",
        several,
        "auto_find_batch_size works in one process only: with several, a core that runs out of memory retries with a "
        "smaller batch while the others wait for it in a collective. Set per_device_train_batch_size.",
    ),
    Refusal(
        "enable_jit_checkpoint",
        "with several processes",
        several,
        "the signal reaches every process at a step of its own, and one would save while the others train. Set "
        "save_steps, and resume_from_checkpoint=True takes the newest checkpoint.",
    ),
    Refusal(
        "deepspeed",
        "with several processes",
        several,
        "DeepSpeed would shard the optimizer, too. Leave it unset: zero_1 shards optimizer states, "
        "mics_partition_size weights and gradients as well.",
    ),
    Refusal(
        "fsdp",
        "with several processes",
        several,
        "FSDP would shard the model, too. Leave it unset: mics_partition_size=N shards weights, gradients and "
        "optimizer states over groups of N cores, over all of them if N is their number.",
    ),
    Refusal(
        "parallelism_config",
        "with several processes",
        several,
        "accelerate's ParallelismConfig would shard the model, too. Leave it unset and give tensor_parallel_size, "
        "context_parallel_size and the other degrees.",
    ),
    Refusal(
        "debug",
        'if it names "tpu_metrics_debug"',
        lambda args: "tpu_metrics_debug" in str(args.debug),
        "tpu_metrics_debug reports on XLA devices, which NeuronCores are not here.",
    ),
    Refusal(
        "debug",
        'if it names "underflow_overflow", with pipeline_parallel_size above 1',
        lambda args: "underflow_overflow" in str(args.debug) and args.pipeline_parallel_size > 1,
        "its hooks expect the forward of a whole model, which no stage of a pipeline has. Look for overflows with "
        "pipeline_parallel_size=1, at any tensor_parallel_size.",
    ),
    Refusal(
        "predict_with_generate",
        "with pipeline_parallel_size above 1",
        lambda args: args.pipeline_parallel_size > 1,
        "a pipeline works on whole batches and generates no text token by token. Set pipeline_parallel_size=1, or "
        "save the model and generate with it at another layout.",
    ),
    Refusal(
        "ddp_backend",
        'on NeuronCores, other than "neuron"',
        lambda args: on_core(args) and args.ddp_backend != "neuron",
        "processes on NeuronCores talk through the backend neuron. Leave it unset.",
    ),
)


def check(args: Any) -> None:
    """Raise ValueError, with the reason, for the first argument whose value can't be honoured."""
    for refusal in REFUSALS:
        value = getattr(args, refusal.argument, None)  # some are those of one class of arguments
        if value and refusal.applies(args):
            raise ValueError(f"{refusal.argument}={value!r} is refused: {refusal.reason}")
