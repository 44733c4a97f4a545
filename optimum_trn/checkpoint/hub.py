"""Models by Hub id: one rank of each host downloads, the others wait for it and read the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import is_offline_mode
from transformers import AutoModel

from . import stock
from .agreement import agreed, is_first_on_host
from .load import ShardedLoad


def downloaded_once(
    auto_class: type[AutoModel], load: ShardedLoad, name: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments with which this rank loads `name` after the first rank of its host has downloaded it.

    A collective over the world if that has several ranks, else nothing. What the first rank of a host says wrong with
    the download is raised on all ranks, see `agreed`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return kwargs
    is_first = is_first_on_host()
    is_remote = not Path(name).exists() and not kwargs.get("local_files_only") and not is_offline_mode()
    with agreed(f"Downloading {name}"):
        if is_first and is_remote:
            stock.fetch(auto_class, load, name, **kwargs)
    if not is_remote:
        return kwargs
    kwargs = {key: value for key, value in kwargs.items() if key != "force_download"}
    return kwargs if is_first else {**kwargs, "local_files_only": True}
