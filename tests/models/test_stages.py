"""Every class of every family, cut into stages that run one after the other in this process, is its stock self."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.utils._pytree import tree_map_only

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.parallel.pipeline import Kept, _backward_inputs, _backward_weights, _gradient
from optimum_trn.parallel.transfers import floating
from optimum_trn.patching import plan_for
from optimum_trn.patching.pipelined import own_inputs
from optimum_trn.patching.pipelining import stacks_of
from optimum_trn.patching.stage_map import map_stages
from optimum_trn.patching.stage_plan import stage_ends
from optimum_trn.patching.stages import StagedModel
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
    maps = [map_stages(own, stacks_of(own, ends), ends, beside) for own in models]
    return [
        StagedModel(own, stages, Place(rank, num_ranks))
        for rank, (own, stages) in enumerate(zip(models, maps, strict=True))
    ]


def differences(model_type, kind, num_stages, num_ranks=2, splits_backward=False):
    """The relative errors of the loss or outputs and of all gradients, the largest of them.

    The backward pass goes through all stages at once, or as with the zero-bubble schedule: in each stage first to what
    it has received, then to its weights.
    """
    model = tiny_class(model_type, kind)
    batch = class_batch(model, kind)
    ranks = staged(model, num_ranks, num_stages)
    with KeepFloat64():
        expected = _sum_of(model(**batch))
        expected.backward()
        received, kept = None, []
        for stage in range(num_stages):
            own = ranks[stage % num_ranks]
            if splits_backward:
                received = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(), received)
            inputs = own_inputs(own, stage, batch, received)
            sent = own.run(stage, received, lambda own=own, inputs=inputs: own.model(**inputs))
            last = stage == num_stages - 1
            kept.append(Kept(floating(received), [_sum_of(sent)] if last else floating(sent)))
            received = sent
        result = kept[-1].outputs[0]
        if splits_backward:
            for stage in reversed(range(num_stages)):
                weights = ranks[stage % num_ranks].weights(stage)
                _backward_inputs(kept[stage], weights)
                _backward_weights(kept[stage], weights)
                if stage:
                    kept[stage - 1].gradients = [_gradient(tensor) for tensor in kept[stage].inputs]
        else:
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
    return float((actual.detach() - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1e-6))


def _sum_of(outputs):
    if outputs.get("loss") is not None:
        return outputs.loss
    generator = torch.Generator().manual_seed(0)
    first = outputs[0]
    return (first * torch.randn(first.shape, generator=generator, dtype=first.dtype)).sum()


STRUCTURES = {
    "bert": "masked",
    "bloom": "causal",
    "gemma3_text": "causal",
    "gpt2": "causal",
    "mixtral": "causal",
    "opt": "causal",
    "vit": "image",
    "xlm-roberta": "token",
}
"""A class of each structure: tuples from layers, masks by layer, heads before the base model, and so on."""


@pytest.mark.parametrize("model_type", STRUCTURES)
@pytest.mark.parametrize("splits_backward", [False, True])
def test_stages_one_after_the_other_equal_the_stock_model(model_type, splits_backward):
    name, error = differences(model_type, STRUCTURES[model_type], num_stages=2, splits_backward=splits_backward)
    assert error < 1e-9, f"{name} is off by {error}"


@pytest.mark.parametrize(
    ("model_type", "kind", "num_stages"), [("t5", "seq2seq", 4), ("bart", "seq2seq", 3), ("whisper", "speech", 2)]
)
def test_an_encoder_and_its_decoder_are_cut_as_one_chain(model_type, kind, num_stages):
    name, error = differences(model_type, kind, num_stages)
    assert error < 1e-9, f"{name} is off by {error}"


@pytest.mark.full
@pytest.mark.parametrize("model_type", [name for name in families() if name not in WITHOUT_CUT])
def test_every_class_of_a_family_in_stages_equals_its_stock_self(model_type):
    for kind in kinds(model_type):
        name, error = differences(model_type, kind, num_stages=2)
        assert error < 1e-9, f"{model_type} {kind}: {name} is off by {error}"


@pytest.mark.parametrize("model_type", sorted(WITHOUT_CUT))
def test_models_without_a_cut_are_refused_by_name(model_type):
    with pytest.raises((PlanError, UnsupportedModelError), match=model_type):
        differences(model_type, kinds(model_type)[0], num_stages=2)


def test_a_module_on_the_wrong_side_of_the_layers_is_noticed():
    model = tiny_class("llama", "causal")
    stages = map_stages(model, ["model.layers"], ["model.layers.0"], {"model.norm": "before"})
    second = StagedModel(model, stages, Place(1, 2))
    batch = class_batch(model, "causal")
    hidden = torch.zeros(3, 11, model.config.hidden_size, dtype=torch.float64)
    with pytest.raises(PlanError, match="LlamaRMSNorm counts as before the layers, but is used after"):
        second.run(1, hidden, lambda: model(**batch))
