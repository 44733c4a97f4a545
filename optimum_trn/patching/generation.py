"""Text from a patched model: the ranks that share it draw the same tokens, and a pipeline says that it draws none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from optimum_trn.errors import PlanError
from optimum_trn.patching.state import state_of

SHARING_AXES = ("tp", "cp")


class Generate:
    """`generate` of one patched model: what samples goes on from the generator of the first rank of the copy.

    A collective over the ranks that share the copy: all of them must call it, with the same inputs. Raises `PlanError`
    on a pipeline.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self.model)
        assert state is not None and state.mesh is not None
        if state.pipeline is not None:
            raise PlanError(
                f"{type(self.model).__name__} is cut into {state.config.pipeline_parallel_size} pipeline stages, which "
                "work on whole batches and generate no text token by token. Save the model and load it with "
                "pipeline_parallel_size=1 to generate."
            )
        _share_generator(next(self.model.parameters()).device, state.mesh)
        return type(self.model).generate(self.model, *args, **kwargs)


def _share_generator(device: torch.device, mesh: DeviceMesh) -> None:
    """Continue with the random numbers of the first rank, on all ranks that share a copy of the model."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    where = () if device.type == "cpu" else (device,)
    state = module.get_rng_state(*where)
    for axis in SHARING_AXES:
        if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1:
            shared = state.to(device)
            dist.broadcast(shared, group=mesh.get_group(axis), group_src=0)
            state = shared.cpu()
    module.set_rng_state(state, *where)
