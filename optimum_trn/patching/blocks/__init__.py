"""Roles: what the sub-modules of a transformer layer are for, and which steps of a schedule follow from it."""

from optimum_trn.patching.blocks.attention import Attention, FusedAttention, LatentAttention
from optimum_trn.patching.blocks.experts import Experts
from optimum_trn.patching.blocks.mlp import MLP, FusedGatedMLP, GatedMLP
from optimum_trn.patching.blocks.region import Region
from optimum_trn.patching.blocks.role import OneOf, Role, Where, column_wise

__all__ = [
    "MLP",
    "Attention",
    "Experts",
    "FusedAttention",
    "FusedGatedMLP",
    "GatedMLP",
    "LatentAttention",
    "OneOf",
    "Region",
    "Role",
    "Where",
    "column_wise",
]
