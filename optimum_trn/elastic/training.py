"""The engine of a NeuronTrainer that `optimum-trn launch` has started with fault tolerance."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from optimum_trn.cost.cores import MACHINES
from optimum_trn.device import device_type, launched
from optimum_trn.elastic.assignment import Planner
from optimum_trn.elastic.engine import Engine
from optimum_trn.elastic.layers import Layers
from optimum_trn.elastic.membership import Membership
from optimum_trn.elastic.templates import minimum_nodes
from optimum_trn.hardware import DEFAULT_INSTANCE
from optimum_trn.parallel import ParallelConfig
from optimum_trn.planning import Layout, Workload, architecture_of, estimate_memory
from optimum_trn.planning.memory import USABLE


def engine_of(trainer: Any) -> Engine:
    """The engine of a Trainer whose model and optimizer are whole and ready.

    Raises `PlanError` where the nodes are too few for what was promised.
    """
    args = trainer.args
    optimizer = trainer.optimizer
    optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    layers = Layers(trainer.model, optimizer)
    nodes, devices = int(os.environ[launched.NODES]), int(os.environ[launched.DEVICES])
    minimum = args.minimum_nodes or nodes_that_fit(trainer.model.config, args, nodes, devices)
    planner = Planner.of_job(
        layers.costs, nodes, devices, minimum, args.fault_tolerance, args.gradient_accumulation_steps
    )
    membership = Membership.from_environment()
    gc.collect()
    gc.freeze()  # what is there by now stays: to look through it again would take most of the time of a recovery
    return Engine(membership, layers, planner, devices, args.seed, timedelta(seconds=args.ddp_timeout))


def nodes_that_fit(config: Any, args: Any, nodes: int, devices: int) -> int:
    """The fewest nodes that have room for one copy of a model, by the memory model of the planner.

    In float32 with AdamW's moments, as the weights of a Trainer are, for sequences of the longest length that the model
    takes, and of 4096 tokens where that is longer or not known.
    """
    chosen = DEFAULT_INSTANCE if device_type() == "cpu" else os.environ.get("OPTIMUM_TRN_INSTANCE", DEFAULT_INSTANCE)
    # Smaller instances of a family are not priced; they have the cores of the large one.  Of a node, what the job uses.
    machine = MACHINES.get(chosen, MACHINES["trn2.48xlarge"])
    machine = replace(machine, cores_per_chip=devices, num_chips=1)
    architecture = architecture_of(config)
    length = min(getattr(config, "max_position_embeddings", None) or 4096, 4096)
    micro_batch = args.per_device_train_batch_size
    needed = []
    for count in range(1, nodes + 1):
        if count * devices <= architecture.layers:
            batch = micro_batch * args.gradient_accumulation_steps
            workload = Workload(architecture, machine, count, length, batch, "fp32")
            parallel = ParallelConfig(pipeline_parallel_size=count * devices, zero_1=False)
            needed.append(estimate_memory(workload, Layout(parallel, micro_batch)).total)
    return minimum_nodes(needed, USABLE * machine.core.hbm_bytes)
