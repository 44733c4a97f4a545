"""Stores of the files of a checkpoint, as chunks with checksums that many ranks put and any rank can get."""

from .chunk import Chunk, ChunkStore, Extent
from .directory import DirectoryStore
from .memory import MemoryStore

__all__ = ["Chunk", "ChunkStore", "DirectoryStore", "Extent", "MemoryStore"]
