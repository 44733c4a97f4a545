"""Models of the Hub in the pool: their files pass through the local cache, and the Hub stays their origin."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ..errors import StoreError
from .client import Pool
from .manifest import FileManifest

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles


def put_from_hub(
    pool: Pool, repository: str, name: str, strategy: str = "hybrid", replicas: int = 1
) -> list[FileManifest]:
    """Put the safetensors, configs and tokenizer of a Hub repository; `StoreError` if it cannot be had."""
    try:
        root = Path(snapshot_download(repository, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StoreError(
            f"{repository} is neither a directory nor a model of the Hub that can be had: {error}"
        ) from error
    revision = root.name  # snapshots are named after their commit
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [
        pool.put(
            path,
            f"{name}/{(inner := path.relative_to(root).as_posix())}",
            strategy,
            replicas,
            origin=f"hf://{repository}@{revision}/{inner}",
        )
        for path in files
    ]
