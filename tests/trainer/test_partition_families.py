"""Models of other kinds in sharded groups: encoder-decoders, encoders, tied heads, experts."""

import pytest
import torch

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.grad_norm import total_norm
from optimum_trn.parallel.mesh import axis_of
from optimum_trn.parallel.mics import partitioned_gradients
from optimum_trn.parallel.topology import launched_topology
from optimum_trn.patching import patch_model, state_of
from optimum_trn.trainer.partition import partition_model
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.tiny import KeepFloat64

FAMILIES = {
    "gpt2": "causal",
    "t5": "seq2seq",
    "bart": "seq2seq",
    "bert": "masked",
    "vit": "image",
    "mixtral": "causal",
    "gemma2": "causal",
    "whisper": "speech",
}


def gradients(rank, world_size, size):
    """What is wrong, by model type."""
    found = {model_type: problem(model_type, size, world_size) for model_type in FAMILIES}
    return {model_type: error for model_type, error in found.items() if error is not None}


def problem(model_type, size, world_size):
    """The difference between a model in a group and in one process, as text."""
    model, expected = (tiny_class(model_type, FAMILIES[model_type]) for _ in range(2))
    config = ParallelConfig(size, mics_partition_size=world_size // size)
    mesh = config.build_mesh()
    patch_model(model, config, mesh)
    partition_model(model, mesh, launched_topology(world_size), local_device())
    copies = axis_of(mesh, "dp").size()
    with KeepFloat64():
        for place in range(copies):
            rows = class_batch(expected, FAMILIES[model_type], seed=place)
            (expected(**rows).loss / copies).backward()
            if place == mesh.get_local_rank("dp"):
                mine = {key: value.detach().to(local_device()) for key, value in rows.items()}
        model(**mine).loss.backward()
    named = list(model.named_parameters())
    group, shards = mesh.get_group("tp"), mesh.get_group("dp_shard")
    norm = total_norm(partitioned_gradients(named), state_of(model).placements, group, 2.0, [shards])
    reference = torch.nn.utils.clip_grad_norm_(expected.parameters(), float("inf"))
    if abs(norm.item() - reference.item()) > 1e-9 * reference.item():
        return f"the norm is {norm.item()}, not {reference.item()}"
    others = dict(expected.named_parameters())
    for name, parameter in named if size == 1 else ():
        if others[name].grad is not None:
            found = parameter.grad.full_tensor().cpu()
            if not torch.allclose(found, others[name].grad, rtol=1e-9, atol=1e-12):
                return f"{name} is off by {(found - others[name].grad).abs().max()}"
    return None


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_and_their_norm_in_a_group_are_those_of_one_process(size):
    assert run_ranks(gradients, 2 * size, size, environment=FLOAT64, timeout=300) == [{}] * (2 * size)
