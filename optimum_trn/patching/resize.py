"""Resizing the vocabulary of a patched model, as its stock class does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import TENSOR_AXIS, RankGroup
from optimum_trn.patching.adapters import has_adapters
from optimum_trn.patching.cutting import cut, place_parameters, restore
from optimum_trn.patching.state import STATE_ATTRIBUTE, state_of
from optimum_trn.patching.styles import HoldsName, VocabParallel, VocabParallelHead


class ResizeTokenEmbeddings:
    """`resize_token_embeddings` of one patched model; a collective over all ranks that hold the model.

    The embeddings, and nothing else, become whole for as long as the stock method works on them.  Rows that it draws
    are those of the first rank, everywhere.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        model = self.model
        state = state_of(model)
        assert state is not None and state.mesh is not None
        if has_adapters(model):
            raise PlanError("The vocabulary cannot be resized under adapters: resize it before PEFT adds them.")
        kinds = (VocabParallel, VocabParallelHead, HoldsName)
        actions = [action for action in state.actions if isinstance(action.style, kinds)]
        restore(model, actions, state.placements, state.tp_group)
        embedding: nn.Module = type(model).resize_token_embeddings(model, *args, **kwargs)
        paths = dict.fromkeys(path for path, _ in actions)
        parameters = [p for path in paths for p in model.get_submodule(path).parameters(recurse=False)]
        with torch.no_grad():
            for parameter in dict.fromkeys(parameters):
                if parameter.grad is not None and parameter.grad.shape != parameter.shape:
                    parameter.grad = None  # the stock method leaves that of the old rows
                for group in (state.tp_group, state.dp_group):
                    dist.broadcast(parameter.data, group=group, group_src=0)
        size = state.config.tensor_parallel_size
        resized = {id(parameter) for parameter in parameters}
        placed = place_parameters(model, actions, size)
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in resized}
        placements = {**state.placements, **{name: placed[name] for name in names}}
        cut(model, actions, placements, RankGroup(state.mesh.get_group(TENSOR_AXIS)))
        sizes = {name: torch.Size(placements[name].global_shape).numel() for name, _ in model.named_parameters()}
        report = replace(
            state.report,
            total_parameters=sum(sizes.values()),
            local_parameters=sum(parameter.numel() for parameter in model.parameters()),
        )
        setattr(model, STATE_ATTRIBUTE, replace(state, placements=placements, report=report))
        return embedding
