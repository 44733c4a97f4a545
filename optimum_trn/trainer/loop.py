"""accelerate's Accelerator for training loops of one's own on sharded models."""

from __future__ import annotations

from typing import Any

from accelerate.accelerator import Accelerator
from torch import nn

from ..errors import MeshError
from ..parallel import ParallelConfig
from ..patching import state_of
from .accelerator import DataParallelAccelerator
from .arguments import check_world_size, degrees_of


class NeuronAccelerator(Accelerator):
    """`accelerate.Accelerator` whose processes share models as `parallel_config` says; the rest are data-parallel.

    Takes what `Accelerator` takes. `num_processes`, loaders, `gather_for_metrics`, `reduce` and `clip_grad_norm_` count
    every row and every parameter once; see `DataParallelAccelerator`. In one process it is the stock Accelerator.

    Raises `MeshError` if the degrees do not divide the world size, and when `prepare` is given a model that is not
    sharded by them.
    """

    def __init__(self, *args: Any, parallel_config: ParallelConfig | None = None, **kwargs: Any) -> None:
        self.parallel_config = parallel_config or ParallelConfig()
        check_world_size(self.parallel_config)
        super().__init__(*args, **kwargs)
        if self.num_processes > 1:
            mesh = self.parallel_config.build_mesh(self.device.type)
            assert mesh is not None
            DataParallelAccelerator.adopt(self, mesh, self.parallel_config)

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """As in accelerate, for a model that is sharded already, since an optimizer holds its parameters."""
        state = state_of(model)
        config = ParallelConfig() if state is None else state.config
        if config.of_model != self.parallel_config.of_model:
            raise MeshError(
                f"{type(model).__name__} is shared by {degrees_of(config) or 'no degree'}, but this accelerator by "
                f"{degrees_of(self.parallel_config) or 'none'}. Load it with NeuronModelForCausalLM.from_pretrained"
                "(name, parallel_config), or call patch_model(model, parallel_config), before its optimizer is made."
            )
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared
