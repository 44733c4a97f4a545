"""Deletes the oldest checkpoints beyond `save_total_limit`, each as a whole."""

from __future__ import annotations

from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from .saving import delete


def rotate(output_dir: Path, save_total_limit: int | None, best_model_checkpoint: str | None) -> None:
    """Keep as many checkpoints as transformers keeps, and the same: the newest, and the best even if it is older."""
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(str(output_dir), use_mtime=True)
    protected = {checkpoints[-1]} if checkpoints else set()
    if best_model_checkpoint is not None:
        protected.add(str(Path(best_model_checkpoint)))
    surplus = len(checkpoints) - max(save_total_limit, len(protected))
    for checkpoint in [path for path in checkpoints if path not in protected][: max(0, surplus)]:
        delete(Path(checkpoint))
