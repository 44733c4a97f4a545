"""What the HBM of a core holds over a step, by what the bytes are for; its peak, and who holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils._pytree import tree_leaves

from optimum_trn.planning.recording import Recording

if TYPE_CHECKING:
    from optimum_trn.planning.rehearsal import Rehearsal

TRACED = ("weights", "gradients", "optimizer", "activations", "collective buffers", "inputs")
"""Categories of what a trace sees; code and scratch of compiled graphs are the cost model's (memory.py)."""


@dataclass(frozen=True)
class HbmTimeline:
    """Changes of a core's HBM in the order of a step's events, and what was there before, in bytes by category.

    `changes` are (place in the events, category, bytes more or fewer, number of the storage).
    """

    before: dict[str, int]
    changes: tuple[tuple[int, str, int, int], ...]
    events: int

    def samples(self, limit: int | None = None) -> list[tuple[int, dict[str, int]]]:
        """What is held after each change; of `limit` stretches of the step the fullest moment each, if given."""
        held = dict(self.before)
        points = [(0, dict(held))]
        stretch = -1
        for place, category, size, _ in self.changes:
            held[category] = held.get(category, 0) + size
            now = place * limit // max(1, self.events) if limit else len(points)
            if now != stretch:
                points.append((place, dict(held)))
                stretch = now
            elif sum(held.values()) > sum(points[-1][1].values()):
                points[-1] = (place, dict(held))
        return points

    def at_peak(self) -> dict[str, int]:
        """What is held at the fullest moment."""
        return max((point for _, point in self.samples()), key=lambda point: sum(point.values()))

    @property
    def peak_bytes(self) -> int:
        """All bytes at the fullest moment."""
        return sum(self.at_peak().values())

    @property
    def peak_place(self) -> int:
        """Where in the events the fullest moment is."""
        return max(self.samples(), key=lambda point: sum(point[1].values()))[0]


def hbm_timeline(recording: Recording, rehearsal: Rehearsal) -> HbmTimeline:
    """The timeline of the step that was recorded last, whose storages are told apart by who holds them after it."""
    optimizer = rehearsal.optimizer
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    recording.mark("optimizer", [*masters, *tree_leaves([dict(state) for state in optimizer.state.values()])])
    recording.mark("weights", [*rehearsal.model.parameters(), *rehearsal.model.buffers()])
    recording.mark("inputs", rehearsal.batch.values())
    kinds = recording.kinds
    before = dict.fromkeys(TRACED, 0)
    for number, size in recording.before.items():
        before[kinds.get(number, "activations")] += size
    changes = [(place, kinds.get(number, "activations"), size, number) for place, number, size in recording.memory]
    return HbmTimeline(before, tuple(changes), len(recording.record.events))
