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


class StoreError(ValueError):
    """A store refuses what it was asked, or does not understand it."""


class MissingError(StoreError):
    """A store does not have, or no longer has, what it was asked for."""


class NeuronOutOfMemoryError(torch.OutOfMemoryError):
    """A simulated NeuronCore, or the host behind it, has no memory left for a request."""
