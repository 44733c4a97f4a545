"""The figures in Gemini's abstract and introduction, computed from what they assume (Wang et al., SOSP 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from optimum_trn.checkpoint.placement import mixed_placement
from optimum_trn.elastic.intervals import wasted_seconds

BYTES_PER_PARAMETER = 12
"""Float32 weights and Adam's two moments: what 42 minutes for 530 billion parameters come to."""
STORE_BITS_PER_SECOND = 20e9
"""Of the remote persistent storage (FSx), all machines together: Gemini, section 7.1."""
LINK_BITS_PER_SECOND = 400e9
"""EFA of a p4d.24xlarge: Gemini, section 7.1."""
MACHINES = 16
ITERATION_SECONDS = 62.0
"""Of 100 billion parameters on 16 p4d.24xlarge: as read off the paper's figures, 60 to 62 seconds."""


@dataclass(frozen=True)
class Headline:
    """A published figure beside ours, in the same `unit`, and what was assumed to compute it."""

    name: str
    published: str
    ours: float
    unit: str
    assumed: str


def headlines() -> list[Headline]:
    """All figures that follow from arithmetic; none of them is measured."""
    of_530b = _store_seconds(530e9)
    of_100b = _store_seconds(100e9)
    peer = 100e9 * BYTES_PER_PARAMETER / MACHINES * 8 / LINK_BITS_PER_SECOND
    remote_waste = wasted_seconds(of_100b, of_100b, of_100b)
    memory_waste = wasted_seconds(ITERATION_SECONDS, ITERATION_SECONDS, peer)
    store = f"{BYTES_PER_PARAMETER} bytes a parameter, a store of {STORE_BITS_PER_SECOND / 1e9:g} Gbit/s"
    often = "as often as the store allows"
    iteration = f"an iteration of {ITERATION_SECONDS:g} s (read off a figure, 60 to 62)"
    links = f"{MACHINES} machines with links of {LINK_BITS_PER_SECOND / 1e9:g} Gbit/s at line rate"
    return [
        Headline("checkpoint of 530B parameters", "42", of_530b / 60, "min", store),
        Headline(
            "waste of a failure, 530B",
            "105",
            wasted_seconds(of_530b, of_530b, of_530b) / 60,
            "min",
            f"{store}, {often}",
        ),
        Headline("checkpoint of 100B parameters", "8 min", of_100b, "s", store),
        Headline("checkpoints more often, 100B", "8", of_100b / ITERATION_SECONDS, "x", f"{iteration}; {store}"),
        Headline(
            "less waste of a failure, 100B",
            "> 13",
            remote_waste / memory_waste,
            "x",
            f"{iteration}; a copy to a peer of {peer:g} s",
        ),
        Headline(
            "faster retrieval, 100B",
            "250",
            of_100b / peer,
            "x at most",
            f"{links}; 250 is {250 * peer / of_100b:.0%} of it",
        ),
        Headline(
            "recovered from memory, 2 of 16 lost",
            "93.3",
            100 * mixed_placement(16, 2).recovery_probability(2),
            "%",
            "2 copies in groups of 2; exact",
        ),
    ]


def _store_seconds(parameters: float) -> float:
    return parameters * BYTES_PER_PARAMETER * 8 / STORE_BITS_PER_SECOND
