"""Planning: what a training step needs, takes and costs, before anything is rented."""

from optimum_trn.planning.architecture import Architecture, architecture_of
from optimum_trn.planning.memory import MemoryEstimate, estimate_memory
from optimum_trn.planning.planner import Plan, plan
from optimum_trn.planning.search import search
from optimum_trn.planning.step import StepEstimate, estimate_step
from optimum_trn.planning.trace import StepTrace, trace_training_step
from optimum_trn.planning.workload import Layout, Workload

__all__ = [
    "Architecture",
    "Layout",
    "MemoryEstimate",
    "Plan",
    "StepEstimate",
    "StepTrace",
    "Workload",
    "architecture_of",
    "estimate_memory",
    "estimate_step",
    "plan",
    "search",
    "trace_training_step",
]
