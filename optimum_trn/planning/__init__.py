"""Planning: what a training step needs, takes and costs, before anything is rented."""

from optimum_trn.planning.architecture import Architecture, architecture_of
from optimum_trn.planning.step import StepEstimate, estimate_step
from optimum_trn.planning.trace import StepTrace, trace_training_step
from optimum_trn.planning.workload import Layout, Workload

__all__ = [
    "Architecture",
    "Layout",
    "StepEstimate",
    "StepTrace",
    "Workload",
    "architecture_of",
    "estimate_step",
    "trace_training_step",
]
