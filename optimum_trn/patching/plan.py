"""Plans: how the models of one type are sharded, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from optimum_trn.errors import PlanError
from optimum_trn.patching.blocks import Region, Role, column_wise
from optimum_trn.patching.dropout import draws_random
from optimum_trn.patching.elsewhere import Side
from optimum_trn.patching.schedule import Schedule
from optimum_trn.patching.styles import HoldsName


@dataclass(frozen=True)
class Stack:
    """The layers at a path within the base model, with wildcards, and the roles of their parts.

    `config` is the attribute of the model's config that describes them, if it is a config of its own.
    """

    layers: str
    roles: tuple[Role, ...]
    config: str | None = None

    def __init__(self, layers: str, *roles: Role, config: str | None = None) -> None:
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "roles", roles)
        object.__setattr__(self, "config", config)

    def config_of(self, config: Any) -> Any:
        """The config that describes these layers; a model of this stack alone has it as its own."""
        return getattr(config, self.config, config) if self.config else config

    def sizes(self, config: Any) -> Mapping[str, int]:
        """Numbers of parts that go to the ranks, by name in the config."""
        return {name: size for role in self.roles for name, size in role.sizes(self.config_of(config)).items()}


@dataclass(frozen=True)
class ModelPlan:
    """How models of `model_type` (that of their config) are sharded.

    `layers` and `embedding` are paths within the base model, so that one plan serves it under every head; the output
    embeddings, where a class has them, are cut along the vocabulary, too.  A model with several stacks of layers, such
    as an encoder and a decoder, gives `stacks` instead of `attention`, `mlp` and `layers`, and often several
    embeddings: the plan covers those of them that a class has.

    An inferred plan may leave the output embeddings whole (`head`), and says which parts are `unproven` and therefore
    whole, by path, and why.

    For pipeline stages: `beside_layers` says of modules whether they are used before or after the layers, where that is
    not the order in which they are registered; a model that `shares_layers` uses some weights in several layers.
    """

    model_type: str
    attention: Role | None = None
    mlp: Role | None = None
    layers: str = "layers"
    embedding: str | tuple[str, ...] = "embed_tokens"
    stacks: tuple[Stack, ...] = ()
    head: bool = True
    unproven: Mapping[str, str] = field(default_factory=dict)
    beside_layers: Mapping[str, Side] = field(default_factory=dict)
    shares_layers: bool = False

    def every_stack(self) -> tuple[Stack, ...]:
        """All stacks of layers, in the order of the plan."""
        own = tuple(role for role in (self.attention, self.mlp) if role is not None)
        return (*((Stack(self.layers, *own),) if own else ()), *self.stacks)

    def sizes(self, config: Any) -> Mapping[str, int]:
        """Every number of parts that go to the ranks, by its name in the config."""
        sizes = {name: size for stack in self.every_stack() for name, size in stack.sizes(config).items()}
        vocabulary = getattr(config, "vocab_size", None) if self.embedding else None
        return sizes if vocabulary is None else {**sizes, "vocab_size": vocabulary}

    def validate(self, config: Any, tensor_parallel_size: int) -> None:
        """Raises one `PlanError` that names all numbers which `tensor_parallel_size` exceeds.

        Sizes that it does not divide are filled up with zeros; but a rank without any head, column or token of its own
        would only wait for the others.
        """
        sizes = self.sizes(config)
        misfits = {name: size for name, size in sizes.items() if size < tensor_parallel_size}
        if misfits:
            raise PlanError(
                f"{self.model_type}: tensor_parallel_size {tensor_parallel_size} exceeds "
                + " and ".join(f"{name} {size}" for name, size in misfits.items())
                + f". This model takes any tensor_parallel_size up to {min(sizes.values())}."
            )

    def record(self, schedule: Schedule) -> None:
        """Records the plan for the model of `schedule`; `PlanError` where a path of the plan does not exist."""
        self.record_layers(schedule, "")
        if self.head:
            record_head(schedule)

    def record_layers(self, schedule: Schedule, path: str) -> None:
        """Records embeddings and layers of the model at `path`, which is that of `schedule` or a tower in it."""
        model = schedule.model.get_submodule(path)
        assert isinstance(model, PreTrainedModel)
        prefix = (f"{path}." if path else "") + base_model_prefix(model)
        base = schedule[prefix.rstrip(".")] if prefix else schedule[""]
        for embedding in (self.embedding,) if isinstance(self.embedding, str) else self.embedding:
            if isinstance(self.embedding, str) or base.has(embedding):
                schedule[prefix + embedding].shard("weight", 0).sync("output", "all_reduce")
        stacks = self.every_stack()
        there = [stack for stack in stacks if len(stacks) == 1 or schedule.find(_layers(prefix, stack))]
        if not there:
            raise PlanError(
                f"{type(model).__name__} has none of the layers {[stack.layers for stack in stacks]} of the plan of "
                f"{self.model_type}. Correct the paths; `print(model)` shows what there is."
            )
        for stack in there:
            for role in stack.roles:
                role.record(schedule[_layers(prefix, stack)], stack.config_of(model.config))
            layers = schedule[_layers(prefix, stack)]
            if any(map(draws_random, layers)):
                layers.fork_rng_in_blocks()

    def record_sequence(self, schedule: Schedule) -> None:
        """Records sequence parallelism; `PlanError` for models that are not one stack of decoder layers."""
        if any(isinstance(role, Region) for stack in self.every_stack() for role in stack.roles):
            raise PlanError(
                f"{self.model_type}: sequence_parallel=True is for families with a declaration, and the plan of this "
                "one is inferred. Leave it off."
            )
        stacks = self.every_stack()
        decoders = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
        if len(stacks) != 1 or self.model_type not in decoders:
            raise PlanError(
                f"{self.model_type}: sequence_parallel=True is for decoders, one stack of causal layers. Leave it off."
            )
        schedule[f"{base_model_prefix(schedule.model)}{stacks[0].layers}.*"].sequence_parallel()


def record_head(schedule: Schedule, model_path: str = "") -> None:
    """Cuts the output embeddings of the model at a path along the vocabulary, whatever they are called."""
    model = schedule.model.get_submodule(model_path)
    assert isinstance(model, PreTrainedModel)
    head = model.get_output_embeddings()
    path = next((name for name, module in schedule.model.named_modules() if module is head), None)
    if head is None or path is None:
        return
    column_wise(schedule[path])
    schedule[path].sync("input gradient", "all_reduce").sync("output", "all_gather")
    tied = schedule.model.all_tied_weights_keys  # on the meta device, names may not be one parameter yet
    bias = f"{path}.bias"
    for name, parameter in schedule.model.named_parameters(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        same = parameter is getattr(head, "bias", None) or tied.get(bias) == name or tied.get(name) == bias
        if same and owner != path:
            schedule[owner].replace(HoldsName(own_name))


def _layers(prefix: str, stack: Stack) -> str:
    return f"{prefix}{stack.layers}.*" if stack.layers else f"{prefix}*"


def base_model_prefix(model: PreTrainedModel) -> str:
    """The path of the base model within a transformers model, with a trailing dot; empty if it is the base model."""
    base = model.base_model
    return next((f"{name}." if name else "" for name, module in model.named_modules() if module is base), "")
