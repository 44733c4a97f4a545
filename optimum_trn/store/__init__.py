"""Stores of the files of checkpoints and models: in a directory, in memory, or in that of another process or host."""

from .chunk import Chunk, ChunkStore, Extent
from .client import StoreClient
from .directory import DirectoryStore
from .memory import MemoryStore
from .server import StoreServer
from .shelf import Shelf

__all__ = ["Chunk", "ChunkStore", "DirectoryStore", "Extent", "MemoryStore", "Shelf", "StoreClient", "StoreServer"]
