"""The exceptions that optimum_trn raises, each with the fix in its text."""

import torch


class PlanError(ValueError):
    """A model plan does not fit the model or the requested degrees."""


class MeshError(ValueError):
    """The requested degrees and the world size do not multiply out."""


class UnsupportedModelError(ValueError):
    """No plan exists for a model type, or none could be proven."""


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or damaged."""


class NeuronOutOfMemoryError(torch.OutOfMemoryError):
    """A simulated NeuronCore, or the host behind it, has no memory left for a request."""
