"""Which line of the user's code is running, and under which names it holds tensors: looked up when a graph breaks."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import sysconfig
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(torch.__file__)),
        str(Path(__file__).parent.parent),
    }
)


MOST_KEYS = 64  # of a batch
OWN_REFERENCES = 3  # to the snapshot of a frame's variables: the frame's, a variable's and an argument's


@dataclass(frozen=True)
class CodeLine:
    """A line of a file, and the function it belongs to."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line itself, where its source can be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        return f"{self.file if path.startswith('..') else path}:{self.line}"


@functools.cache
def is_users(file: str) -> bool:
    """Whether code in `file` is the user's: not Python's, an installed package's or this package's."""
    if file.startswith("<"):
        return not file.startswith("<frozen")
    return not os.path.realpath(file).startswith(_LIBRARIES)


def frames() -> list[FrameType]:
    """The frames of this thread, innermost first, without those of the recorder."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OWN):
            found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


_OWN = tuple(str(Path(__file__).with_name(name)) for name in ("code_lines.py", "step_graphs.py", "recompiles.py"))


def users_line(stack: list[FrameType]) -> CodeLine:
    """The innermost line of the user's own code, or where there is none, the outermost of all."""
    frame = next((frame for frame in stack if is_users(frame.f_code.co_filename)), stack[-1])
    return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def names_of_tensors(shape: tuple[int, ...], stack: list[FrameType]) -> list[str]:
    """Under which names the running code holds tensors of `shape`: keys of batches first, then the user's variables."""
    keys: dict[str, None] = {}
    variables: dict[str, None] = {}
    for frame in stack:
        for name, value in _variables(frame):
            if _is_batch(value):
                for key, entry in value.items():
                    if isinstance(key, str) and isinstance(entry, torch.Tensor) and tuple(entry.shape) == shape:
                        keys[key] = None
            elif is_users(frame.f_code.co_filename) and isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                variables[name] = None
    return [*keys, *variables]


def _is_batch(value: Any) -> bool:
    """A plain dictionary or transformers' BatchEncoding; other mappings may do anything when looked through."""
    return (type(value) is dict or isinstance(value, UserDict)) and len(value) <= MOST_KEYS


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Local variables of a function; or those of a module, which are its global ones."""
    found = frame.f_locals
    yield from list(found.items())
    # Until Python 3.13 the frame keeps this snapshot, and with it tensors that the function has let go of since. Where
    # somebody else has it, who called locals(), it is theirs.
    if (
        frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and type(found) is dict
        and sys.getrefcount(found) <= OWN_REFERENCES
    ):
        found.clear()
