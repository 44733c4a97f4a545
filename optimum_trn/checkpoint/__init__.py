"""Checkpoints: sharded loading of stock files, and stock files written from sharded models."""

from .save import save_pretrained

__all__ = ["save_pretrained"]
