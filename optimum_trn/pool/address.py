"""Where the stores of a pool listen and with which token: a file that only its owner reads."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import StoreError


@dataclass(frozen=True)
class PoolAddress:
    """The stores of a pool in their order, its scheduler of leases, and the token that all of them know."""

    stores: tuple[tuple[str, int], ...]
    token: bytes
    scheduler: tuple[str, int] | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, readable by its owner only, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f"_{path.name}-")  # of mode 0600
        with os.fdopen(descriptor, "w") as stream:
            json.dump({**asdict(self), "token": self.token.hex()}, stream)
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> PoolAddress:
        """Read a file that `save` wrote, by default the one at `default_path`; `StoreError` if there is none."""
        path = Path(path or default_path())
        try:
            entries = json.loads(path.read_text())
            scheduler = entries["scheduler"]
            return cls(
                tuple((str(host), int(port)) for host, port in entries["stores"]),
                bytes.fromhex(entries["token"]),
                (str(scheduler[0]), int(scheduler[1])) if scheduler else None,
            )
        except FileNotFoundError:
            raise StoreError(
                f"There is no pool: {path} is missing. Start one with `optimum-trn pool serve`, or name the file of a "
                f"running one in OPTIMUM_TRN_POOL."
            ) from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StoreError(f"{path} is not the file of a pool: {error!r}.") from None


def default_path() -> Path:
    """OPTIMUM_TRN_POOL, or else a file in the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("OPTIMUM_TRN_POOL") or cache / "optimum_trn" / "pool.json")
