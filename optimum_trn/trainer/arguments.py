"""Training arguments: those of transformers, and the degrees of parallelism."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field, fields
from typing import ClassVar

from transformers import TrainingArguments

from ..checkpoint.remote import is_remote, local_directory
from ..device import device_type, launched
from ..errors import MeshError
from ..parallel import ParallelConfig
from ..parallel.mesh import world_size
from ..parallel.schedules import ScheduleName
from . import padding, refusals


@dataclass
class NeuronTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` and the degrees of parallelism; data parallel is what is left of the world size.

    Raises `MeshError`, before a process group or a model exists, when the degrees do not divide the world size, and
    ValueError for the arguments that sharded models or NeuronCores can't honour (refusals.py); the text of each names
    the way out. docs/arguments.md lists what becomes of every argument.
    """

    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Over how many NeuronCores each layer is sharded. Must divide the number of processes (one a "
            "core); at most the number of the model's attention heads."
        },
    )
    sequence_parallel: bool = field(
        default=False,
        metadata={
            "help": "Whether the cores that share a layer also share the activations between its blocks (norms, "
            "residuals, dropout), each holding a run of the sequence. For decoders, with tensor_parallel_size above 1."
        },
    )
    pipeline_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Over how many NeuronCores the layers are cut, in stages. The micro-batches that they work on are "
            "the batches of one optimizer step: gradient_accumulation_steps should be a multiple of it."
        },
    )
    pipeline_schedule: ScheduleName = field(
        default="1f1b",
        metadata={"help": "In which order the stages work: gpipe, 1f1b, interleaved_1f1b or zero_bubble."},
    )
    context_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Over how many NeuronCores the tokens of each sequence are shared, for sequences too long for one. "
            "Attention sees all of them: keys and values go round these cores in a ring."
        },
    )
    expert_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Over how many NeuronCores the experts of a mixture are shared out, among those that have the same "
            "layers; tokens travel to their experts. A multiple of tensor_parallel_size that divides the experts."
        },
    )
    zero_1: bool = field(
        default=True,
        metadata={
            "help": "Whether the states of the optimizer, and float32 master weights of a bfloat16 model, are sharded "
            "over the data-parallel cores (ZeRO-1)."
        },
    )
    optimizer_offload: bool = field(
        default=False,
        metadata={
            "help": "Whether the optimizer and its states, and float32 master weights, are in the memory of the host: "
            "gradients go there during the backward pass, new weights come back after the step (ZeRO-Offload). For "
            "models whose states don't fit; needs zero_1."
        },
    )
    mics_partition_size: str | None = field(
        default=None,
        metadata={
            "help": "Shards weights, gradients and optimizer states over groups of that many data-parallel cores "
            "(MiCS), each of which holds a whole copy; auto: over the smallest groups that have room for them."
        },
    )
    recompute: str | None = field(
        default=None,
        metadata={
            "help": "What training computes again in the backward pass instead of keeping it: full (the layers, as "
            "transformers' activation_checkpointing does), a number such as 0.5 (that ratio of the layers, the first "
            "ones), or selective (the core of attention)."
        },
    )

    fuse_qkv: bool = field(
        default=False,
        metadata={"help": "Whether one product makes queries, keys and values, where these have separate weights."},
    )
    fuse_gate_up: bool = field(
        default=False,
        metadata={"help": "Whether one product makes gate and up projections, where these have separate weights."},
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Whether training goes on while a checkpoint is written, from a copy in the host's memory. It is "
            "in its place before the next one is begun and before training ends; on_save is called before that."
        },
    )
    memory_checkpoint_replicas: int = field(
        default=0,
        metadata={
            "help": "In the memory of how many nodes, its own and its peers', the state after a step is kept: a "
            'lost process or node costs one step at most; resume_from_checkpoint="auto" finds it. 0: none. Needs an '
            "`optimum-trn agent` on every node; steps for which the links have no time are left out."
        },
    )

    static_shapes: str = field(
        default="auto",
        metadata={
            "help": "To which lengths batches are padded, masked and with ignored labels, so that Neuron compiles few "
            "shapes: powers_of_two, or numbers of tokens such as 512 or 128,256,512. The rows of a last, short batch "
            "are filled as well. auto: powers_of_two on NeuronCores, where padding is known to leave the loss as it "
            "is; none: batches stay as they are."
        },
    )

    fault_tolerance: int | None = field(
        default=None,
        metadata={
            "help": "How many nodes may be lost at the same time without a committed step being lost, in a job started "
            "with `optimum-trn launch`, whose -f it defaults to. One step is gradient_accumulation_steps batches of "
            "per_device_train_batch_size rows, of all nodes together."
        },
    )
    minimum_nodes: int | None = field(
        default=None,
        metadata={
            "help": "With fault_tolerance: the fewest nodes that one copy of the model fits on; unless given, what the "
            "memory model says."
        },
    )

    output_url: ClassVar[str | None] = None
    """The output directory where it was given as a URL of fsspec; `output_dir` is then its copy on this host."""

    def __post_init__(self) -> None:
        location = str(self.output_dir)
        if "://" in location:
            self.output_dir = local_directory(location)
            if is_remote(location):
                vars(self)["output_url"] = location.rstrip("/")
        if str(self.mics_partition_size).isdecimal():  # the command line gives text
            self.mics_partition_size = int(str(self.mics_partition_size))  # type: ignore[assignment]
        self._check_fault_tolerance()
        check_world_size(self.parallel_config)
        if self.static_shapes not in ("auto", "none"):
            padding.parsed(self.static_shapes)
        if self.recompute is not None and (self.activation_checkpointing or self.gradient_checkpointing):
            raise ValueError(
                f"recompute={self.recompute!r} and transformers' activation_checkpointing=True both choose what is "
                "computed again: leave one of them unset."
            )
        # accelerate takes part in a process group on the CPU only when it is told to.
        self.use_cpu = self.use_cpu or device_type() == "cpu"
        refusals.check(self)
        super().__post_init__()
        if self.world_size != world_size():
            raise MeshError(
                f"The launcher started {world_size()} processes, but accelerate sees {self.world_size}: the process "
                f"group was not made for {self.device}. Make the training arguments before anything else in the script."
            )

    position: ClassVar[int] = launched.first_position()
    """This process's place among those that survive losses; the first writes and reports."""

    @property
    def should_save(self) -> bool:
        """As in transformers; of the processes that survive losses, only the first that is left writes."""
        return super().should_save and (self.fault_tolerance is None or self.position == 0)

    @property
    def should_log(self) -> bool:
        """As in transformers; of the processes that survive losses, only the first that is left reports."""
        return super().should_log and (self.fault_tolerance is None or self.position == 0)

    def _check_fault_tolerance(self) -> None:
        told = launched.fault_tolerance()
        if self.fault_tolerance is None:
            self.fault_tolerance = (told or 0) if launched.is_launched() else None
        elif not launched.is_launched():
            raise ValueError(
                f"fault_tolerance={self.fault_tolerance} needs a launcher that sees which processes are lost. Start it "
                f"with `optimum-trn launch --nodes N -f {self.fault_tolerance} {command()}`."
            )
        elif told not in (None, self.fault_tolerance):
            raise ValueError(
                f"fault_tolerance={self.fault_tolerance}, but `optimum-trn launch` was given -f {told}. Leave one out."
            )
        if self.fault_tolerance is not None:  # before degrees are, which no other launcher would make legal
            refusals.check(self)

    @property
    def parallel_config(self) -> ParallelConfig:
        """The degrees, as the rest of the package takes them."""
        names = [field.name for field in fields(ParallelConfig)]
        return ParallelConfig(**{name: getattr(self, name) for name in names if hasattr(self, name)})


def check_world_size(config: ParallelConfig) -> None:
    """Raise `MeshError` if the degrees do not divide the world size; say how to launch if there is only one process."""
    size, needed = world_size(), config.ranks_per_copy
    if size == 1 and needed > 1:
        raise MeshError(
            f"{degrees_of(config)} needs {needed} processes, one a NeuronCore, but this is the only one. "
            f"Start it with `torchrun --nproc-per-node {needed} {command()}` or "
            f"`accelerate launch --num_processes {needed} {command()}`."
        )
    config.axis_sizes(size)


def command() -> str:
    """The script of this process and its arguments, as they follow a launcher's own."""
    return shlex.join([os.path.relpath(sys.argv[0]) if sys.argv[0] else "script.py", *sys.argv[1:]])


def degrees_of(config: ParallelConfig) -> str:
    """The degrees above 1 by which one copy of the model is shared, as a user writes them."""
    degrees = {name: degree for name, degree in config.model_degrees.items() if degree > 1}
    if config.mics_partition_size is not None:
        degrees["mics_partition_size"] = config.mics_partition_size  # type: ignore[assignment]
    return " x ".join(f"{name}={degree}" for name, degree in degrees.items())
