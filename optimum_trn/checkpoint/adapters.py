"""Writes the stock files of PEFT adapters whose layers are cut over a pipeline: those of all stages, in one file."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from ..errors import CheckpointError
from ..parallel.mesh import PIPELINE_AXIS
from ..patching import state_of
from .agreement import agreed
from .save import METADATA


def save_adapters(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    is_main_process: bool = True,
    **kwargs: Any,
) -> None:
    """Write what `save_pretrained` of a `PeftModel` would write of the whole model: configs, cards, adapters.

    A collective: every rank of the world must call it.  Each stage sends its adapters to the rank of the first stage,
    which writes them if it says `is_main_process`.  `CheckpointError` for `safe_serialization=False`, and on
    every rank if the disk fails the first.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict

    if not safe_serialization:
        raise CheckpointError("Adapters of a pipeline are saved as safetensors. Leave safe_serialization=True.")
    state = state_of(model)
    assert state is not None and state.mesh is not None
    stages = state.mesh.get_group(PIPELINE_AXIS)
    directory = os.fspath(save_directory)
    with agreed(f"Saving adapters to {directory}"):
        type(model).save_pretrained(
            model, directory, selected_adapters=selected_adapters, is_main_process=is_main_process, **kwargs
        )
    whole: dict[str, dict[str, Any]] = {}
    for name in selected_adapters or model.peft_config:
        own = get_peft_model_state_dict(model, adapter_name=name)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in own.items()}
        if dist.get_rank(stages) > 0:
            dist.send_object_list([tensors], group=stages, group_dst=0)
            continue
        for stage in range(1, dist.get_world_size(stages)):
            received: list[Any] = [None]
            dist.recv_object_list(received, group=stages, group_src=stage)
            tensors |= received[0]
        whole[name] = tensors
    if is_main_process:  # written when nobody waits for this rank any more
        for name, tensors in whole.items():
            inner = directory if name == "default" else os.path.join(directory, name)
            save_file(tensors, os.path.join(inner, SAFETENSORS_WEIGHTS_NAME), METADATA)
