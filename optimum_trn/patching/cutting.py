"""Cuts the parameters of one model to this rank's shards and gives modules their styles, and takes both back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.replicated import GradientRule, RuledForward, ShardGradient
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.styles import Action, RowWise
from optimum_trn.patching.wrappers import Wrapper


def place_parameters(model: nn.Module, actions: Sequence[Action], num_ranks: int) -> dict[str, Placement]:
    """Where every parameter of a stock model is to lie, under each of its names; what no action cuts is replicated.

    Raises `PlanError` for a module that does not suit its style, and for a cut parameter that is tied to a module which
    no action covers, or which would cut it in another way.
    """
    planned: dict[str, Placement] = {}
    by_parameter: dict[int, tuple[str, Placement]] = {}
    for path, style in actions:
        module = model.get_submodule(path)
        try:
            own = style.placements(module, num_ranks)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        for name, placement in own.items():
            planned[f"{path}.{name}"] = placement
            by_parameter[id(module.get_parameter(name))] = f"{path}.{name}", placement
    result = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = Placement.replicate(parameter.shape, num_ranks)
        result[name] = planned.get(name, whole)
        tied_name, placement = by_parameter.get(id(parameter), (name, whole))
        if result[name] != placement:
            raise PlanError(
                f"{name} and {tied_name} are one tied parameter, but the plan shards only one of them, or each along "
                "another dimension. Give both modules a style that cuts it alike."
            )
    return result


def cut(model: nn.Module, actions: Sequence[Action], placements: Mapping[str, Placement], group: RankGroup) -> None:
    """Leaves of the parameters of the actions' modules what this rank holds, and gives the modules their styles."""
    for parameter, placement in _sharded(model, actions, placements):
        replace_data(parameter, partial(placement.shard, rank=group.rank))
    actions = _once(model, actions)
    wrappers = [action for action in actions if isinstance(action.style, Wrapper)]
    for path, style in actions:
        if not isinstance(style, Wrapper):
            style.apply(model.get_submodule(path), group)
    _rule_gradients(model, actions, placements, group)
    for path, style in wrappers:
        style.apply(model.get_submodule(path), group)


def restore(
    model: nn.Module,
    actions: Sequence[Action],
    placements: Mapping[str, Placement],
    group: dist.ProcessGroup | None,
) -> None:
    """Takes back what `cut` did for these actions, with the current full parameters on every rank."""
    for parameter, placement in _sharded(model, actions, placements):
        replace_data(parameter, partial(unshard_from_group, placement=placement, group=group))
    for path, style in reversed(_once(model, actions)):
        module = model.get_submodule(path)
        if type(module.__dict__.get("forward")) is RuledForward:
            del module.forward
        style.revert(module)


def _once(model: nn.Module, actions: Sequence[Action]) -> list[Action]:
    """The actions without those repeated for a module that stands at several paths, as T5's resized embedding does."""
    first: dict[int, str] = {}
    kept = []
    for action in actions:
        path = first.setdefault(id(model.get_submodule(action.path)), action.path)
        if path == action.path or Action(path, action.style) not in actions:
            kept.append(action)
    return kept


def _sharded(
    model: nn.Module, actions: Sequence[Action], placements: Mapping[str, Placement]
) -> list[tuple[nn.Parameter, Placement]]:
    """The parameters of the actions' own modules that do not lie whole on every rank, tied ones once."""
    found = {}
    for path in dict.fromkeys(path for path, _ in actions):
        for name, parameter in model.get_submodule(path).named_parameters(recurse=False):
            placement = placements[f"{path}.{name}"]
            if placement.dim is not None:
                found[id(parameter)] = parameter, placement
    return list(found.values())


def _rule_gradients(
    model: nn.Module, actions: Sequence[Action], placements: Mapping[str, Placement], group: RankGroup
) -> None:
    """Has the gradients of shards summed over the ranks that hold the same, and those of padded input features zeroed.

    Other padding needs nothing: what it computes meets input features that are padding, and so has a gradient of zero.
    """
    groups: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
    row_wise = {path for path, style in actions if isinstance(style, RowWise)}
    for path in dict.fromkeys(path for path, _ in actions):
        module = model.get_submodule(path)
        rules: dict[str, GradientRule] = {}
        for name, _ in module.named_parameters(recurse=False):
            placement = placements[f"{path}.{name}"]
            if placement.dim is None:
                continue
            replicas = _replica_group(placement, group, groups)
            padded = path in row_wise and any(not segment.ranks for segment in placement.segments(group.rank))
            if replicas is not None or padded:
                rules[name] = ShardGradient(placement, group.rank, replicas)
        if rules:
            assert "forward" not in module.__dict__, f"{path}: a style with a forward of its own sees to its gradients"
            module.forward = RuledForward(module, rules)


def _replica_group(
    placement: Placement, group: RankGroup, groups: dict[tuple[tuple[int, ...], ...], RankGroup]
) -> RankGroup | None:
    """The ranks that hold the same parts of a shard as this one; all ranks make a group for every such partition."""
    holders = [{segment.ranks for segment in placement.segments(rank)} for rank in range(placement.num_ranks)]
    partition = tuple(max(sets, key=len) or (rank,) for rank, sets in enumerate(holders))
    if all(len(ranks) == 1 for ranks in partition):
        return None
    if partition not in groups:
        own = partition[group.rank]
        groups[partition] = group if len(own) == group.size else group.among(own)
    return groups[partition]


def replace_data(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
    """Gives the same Parameter, and so everything tied to it, other data; a gradient goes along."""
    with torch.no_grad():
        grad, parameter.grad = parameter.grad, None
        parameter.data = function(parameter.data)
        parameter.grad = None if grad is None else function(grad)
