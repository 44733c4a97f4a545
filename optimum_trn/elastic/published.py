"""Jobs and designs with the constants of Oobleck's published evaluation (Jang et al., SOSP 2023, section 7).

The constants are facts from the simulator in the paper's artifact (its README and its Varuna model), which its authors
measured on 30 A40 GPUs, one a node; nothing here is fitted to what the simulation is compared with, except Bamboo, of
which no constants but the resulting shares of time are known: they are what its two are computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimum_trn.elastic.policies import Bamboo, Elastic, MemoryCheckpoints, Policy, Varuna
from optimum_trn.elastic.simulator import Job, throughput_table

MOST_NODES, FEWEST_NODES = 30, 15
PERIODS = {"6h": 21600.0, "3h": 10800.0, "1h": 3600.0, "30m": 1800.0, "10m": 600.0}
"""Seconds between failures of one node, at which the paper compares."""
VARUNA_CHECKPOINT_STEPS = 10
RECONFIGURE_SECONDS = 2.0
"""Of Oobleck for a failure, from the same README."""
FAULT_TOLERANCE = 1
RETRIEVAL_SECONDS = 1.5
"""Gemini's copy between peers; one node fails at a time here, so that nothing depends on it."""

EFFECTIVE = {"Oobleck": 0.955, "Varuna-like": 0.544, "Bamboo-like": 0.150}
"""Published shares of effective time: BERT-large, one failure in 10 minutes, from 30 to 15 nodes."""
BAMBOO_SHARES = {"effective": 0.150, "redundant": 0.610, "fallback": 0.147, "rebalance": 0.090}
"""All shares of Bamboo's time in the same run."""


@dataclass(frozen=True)
class Evaluated:
    """A model of the evaluation: samples of a step, samples a second on 30, 29, ... 15 nodes, seconds of Varuna's
    checkpoint, and of its restart on so many nodes."""

    samples: float
    throughput: tuple[float, ...]
    checkpoint_seconds: float
    restart_seconds: Callable[[int], float]


def _bert_large_restart(nodes: int) -> float:
    """Measured from 30 to 26 nodes; below, 3.7 s less for each node less."""
    measured = {30: 71.3, 29: 67.6, 28: 67.6, 27: 49.1}
    return measured.get(nodes, 112.0 - 3.7 * (26 - max(min(nodes, 26), FEWEST_NODES)))


def _always(seconds: float) -> Callable[[int], float]:
    return lambda nodes: seconds


def _runs(*runs: tuple[float, int]) -> tuple[float, ...]:
    return tuple(value for value, count in runs for _ in range(count))


MODELS = {
    "bert-large": Evaluated(
        8192,
        (343.13, 331.70, 329.58, 326.54, 306.04, 298.38, 290.04, 280.07)
        + (267.90, 255.72, 243.54, 232.95, 222.37, 211.78, 202.57, 193.36),
        15.8,
        _bert_large_restart,
    ),
    "gpt2": Evaluated(
        1024,
        (125.79, *_runs((117.63, 2)), 106.83, 110.92, *_runs((102.08, 2), (96.65, 2)), 85.83, 88.31)
        + _runs((78.31, 2), (70.46, 2), (64.30, 1)),
        11.5,
        _always(83.0),
    ),
    "gpt3-medium": Evaluated(
        819,
        _runs(
            (42.00, 1), (38.89, 2), (35.85, 1), (33.43, 3), (28.26, 3), (28.23, 1), (25.26, 2), (22.89, 2), (20.91, 1)
        ),
        11.2,
        _always(78.7),
    ),
    "gpt3-2.7b": Evaluated(
        512, _runs((9.768, 1), (9.425, 2), (9.100, 4), (7.470, 4), (6.425, 4), (4.864, 1)), 50.0, _always(515.0)
    ),
    "gpt3-6.7b": Evaluated(
        1024, _runs((5.241, 3), (5.097, 4), (4.503, 4), (3.954, 4), (3.016, 1)), 120.0, _always(701.0)
    ),
}


def job(model: str) -> Job:
    """A model on 30 nodes. Every design has Varuna's throughput, the only one that is published by nodes."""
    evaluated = MODELS[model]
    by_nodes = dict(zip(range(MOST_NODES, FEWEST_NODES - 1, -1), evaluated.throughput, strict=True))
    return Job(model, evaluated.samples, throughput_table(evaluated.samples, by_nodes), MOST_NODES, FEWEST_NODES)


def varuna(model: str, checkpoint_steps: int = VARUNA_CHECKPOINT_STEPS) -> Policy:
    """Varuna with its checkpoint and restart of this model."""
    evaluated = MODELS[model]
    return Varuna(checkpoint_steps, evaluated.checkpoint_seconds, evaluated.restart_seconds)


def bamboo(model: str, checkpoint_steps: int = VARUNA_CHECKPOINT_STEPS) -> Policy:
    """Bamboo with what its published shares of the run at one failure in 10 minutes come to, for any model.

    It checkpoints for the case that neighbours fail at once, which it is not charged for here.
    """
    shares = BAMBOO_SHARES
    return Bamboo(
        redundancy=shares["redundant"] / shares["effective"],
        failover_seconds=(shares["fallback"] + shares["rebalance"]) * PERIODS["10m"],
        checkpoint_steps=checkpoint_steps,
        checkpoint_seconds=0.0,
        restart_seconds=MODELS[model].restart_seconds,
    )


def oobleck(model: str) -> Policy:
    """Oobleck: the step under way is lost, and 2 s."""
    evaluated = MODELS[model]
    behind = MemoryCheckpoints(
        2, 1, RETRIEVAL_SECONDS, evaluated.restart_seconds, VARUNA_CHECKPOINT_STEPS, evaluated.checkpoint_seconds
    )
    return Elastic(FAULT_TOLERANCE, RECONFIGURE_SECONDS, behind, name="Oobleck")
