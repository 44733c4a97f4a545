"""Which rank's random state a rank goes on with when a checkpoint is resumed, at the same layout or at another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..parallel.mesh import AXES, DATA_AXIS


def axes_of(mesh: DeviceMesh | None, world_size: int) -> dict[str, int]:
    """The sizes of the axes of a run's mesh; without one, all ranks are data-parallel."""
    if mesh is None:
        return {axis: world_size if axis == "dp_replicate" else 1 for axis in AXES}
    return {axis: mesh[axis].size() for axis in AXES}


def random_state_file(
    directory: Path, saved: Mapping[str, Any], mesh: DeviceMesh | None, world_size: int, rank: int
) -> Path:
    """The file with the random state that this rank continues with.

    At the same layout its own. At another one that of the first rank which had the same rows, since ranks that share
    the rows must draw the same numbers; rows of data-parallel ranks beyond those that there were draw as the first did.
    """
    if dict(saved) == axes_of(mesh, world_size):
        source = rank
    else:
        replica = rank if mesh is None else mesh.get_local_rank(DATA_AXIS)
        replica %= saved["dp_replicate"] * saved["dp_shard"]
        source = replica * saved["cp"] * saved["tp"]
    saved_ranks = 1
    for size in saved.values():
        saved_ranks *= size
    return directory / ("rng_state.pth" if saved_ranks == 1 else f"rng_state_{source}.pth")
