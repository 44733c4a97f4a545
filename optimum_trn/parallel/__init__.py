"""Tensor-parallel building blocks: meshes, collectives, placements, layers, the loss and the gradient norm."""

from optimum_trn.parallel.cuts import Piece
from optimum_trn.parallel.grad_norm import clip_grad_norm_, grad_norm
from optimum_trn.parallel.mesh import ParallelConfig, RankGroup
from optimum_trn.parallel.sharding import Placement

__all__ = ["ParallelConfig", "Piece", "Placement", "RankGroup", "clip_grad_norm_", "grad_norm"]
