"""A pool of host memory that many jobs stream their models from, and the cores that they take turns on."""

from .address import PoolAddress
from .client import Pool, put_directory
from .hub import put_from_hub

__all__ = ["Pool", "PoolAddress", "put_directory", "put_from_hub"]
