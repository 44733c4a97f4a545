"""Every class of every family, cut into stages that run one after the other in this process, is its stock self."""

import copy
from dataclasses import dataclass

import pytest
import torch

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.patching import plan_for
from optimum_trn.patching.pipelined import own_inputs
from optimum_trn.patching.stage_plan import stage_ends
from optimum_trn.patching.stages import StagedModel, map_stages
from tests.models.families import class_batch, families, kinds, tiny_class
from tests.models.tiny import KeepFloat64

WITHOUT_CUT = {"albert", "clip", "deberta-v2"}
"""The types whose classes have no pipeline cut."""


@dataclass
class Place:
    """What a `RankGroup` says of itself."""

    rank: int
    size: int


def staged(model, num_ranks, num_stages):
    """The stages of each rank, on copies of the model."""
    plan = plan_for(model.config, type(model))
    ends, beside = stage_ends(plan, model, num_stages)
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    return [StagedModel(own, map_stages(own, ends, beside), Place(rank, num_ranks)) for rank, own in enumerate(models)]


def differences(model_type, kind, num_stages, num_ranks=2):
    """The relative errors of the loss or outputs and of all gradients, the largest of them."""
    model = tiny_class(model_type, kind)
    batch = class_batch(model, kind)
    ranks = staged(model, num_ranks, num_stages)
    with KeepFloat64():
        expected = _sum_of(model(**batch))
        expected.backward()
        received = None
        for stage in range(num_stages):
            own = ranks[stage % num_ranks]
            inputs = own_inputs(own, stage, batch)
            received = own.run(stage, received, lambda own=own, inputs=inputs: own.model(**inputs))
        result = _sum_of(received)
        result.backward()
    errors = {"outputs": _error(result, expected)}
    gradients = {}
    for own in ranks:
        for name, parameter in own.model.named_parameters():
            if parameter.grad is not None:
                for alias in own.stages.aliases.get(name, (name,)):
                    gradients[alias] = gradients.get(alias, 0) + parameter.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            errors[name] = _error(gradients[name], parameter.grad)
    return max(errors.items(), key=lambda item: item[1])


def _error(actual, expected):
    return float((actual.detach() - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def _sum_of(outputs):
    if outputs.get("loss") is not None:
        return outputs.loss
    generator = torch.Generator().manual_seed(0)
    first = outputs[0]
    return (first * torch.randn(first.shape, generator=generator, dtype=first.dtype)).sum()


@pytest.mark.parametrize("model_type", [name for name in families() if name not in WITHOUT_CUT])
def test_every_class_of_a_family_in_stages_equals_its_stock_self(model_type):
    for kind in kinds(model_type):
        name, error = differences(model_type, kind, num_stages=2)
        assert error < 1e-9, f"{model_type} {kind}: {name} is off by {error}"


@pytest.mark.parametrize("model_type", sorted(WITHOUT_CUT))
def test_models_without_a_cut_are_refused_by_name(model_type):
    with pytest.raises((PlanError, UnsupportedModelError), match=model_type.split("-")[0]):
        differences(model_type, kinds(model_type)[0], num_stages=2)
