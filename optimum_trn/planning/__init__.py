"""Planning: what a training step needs, learned by running the real modules on fake tensors."""

from optimum_trn.planning.trace import StepTrace, trace_training_step

__all__ = ["StepTrace", "trace_training_step"]
