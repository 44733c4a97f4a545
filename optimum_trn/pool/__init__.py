"""A pool of host memory that many jobs stream their models from, and the cores that they take turns on."""

import importlib
from typing import Any

from .address import PoolAddress
from .client import Pool, put_directory
from .hub import put_from_hub

__all__ = ["Pool", "PoolAddress", "StreamedModel", "put_directory", "put_from_hub", "stream_model"]


def __getattr__(name: str) -> Any:
    if name not in ("StreamedModel", "stream_model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".streaming", __name__), name)  # which imports transformers
