"""A pool of host memory that many jobs stream their models from, and the cores that they take turns on."""

import importlib
from typing import Any

from .address import PoolAddress
from .client import Pool, put_directory
from .hub import put_from_hub

_HOMES = {  # of what imports transformers
    "StreamedModel": ".streaming",
    "stream_model": ".streaming",
    "YieldCores": ".lending",
    "lease": ".lending",
    "lend": ".lending",
    "Dispatcher": ".serving",
}

__all__ = ["Pool", "PoolAddress", "put_directory", "put_from_hub", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
