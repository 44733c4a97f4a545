"""Simulates pools at scale: `python benchmarks/pool_simulation.py` prints the tables of docs/pool.md."""

from __future__ import annotations

from dataclasses import replace

from optimum_trn.pool.grouping import Layer, Stages, equal_groups, progress
from optimum_trn.pool.simulator import GB, Scenario, host_memory, simulate

ZIPF = (0.0, 0.9, 0.99)


def routing() -> None:
    """Cache-aware routing beside least-loaded, at saturation."""
    print("| cores | link | Zipf | requests/s | least loaded | gain | hits | least loaded | utilisation | p99 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cores, per_server in ((16, 1), (16, 8), (64, 1), (1000, 1)):
        base = Scenario(cores=cores, cores_per_server=per_server, host_cache=0.0, requests=max(10_000, 40 * cores))
        if per_server > 1:
            base = replace(base, host_cache=4.1 * GB)
        for zipf in ZIPF:
            aware = simulate(replace(base, zipf=zipf))
            least = simulate(replace(base, zipf=zipf, policy="least loaded"))
            link = "each core its own" if per_server == 1 else f"shared by {per_server}"
            print(
                f"| {cores} | {link} | {zipf} | {aware.throughput:.0f} | {least.throughput:.0f} | "
                f"{aware.throughput / least.throughput - 1:+.1%} | {aware.hit_rate:.2f} | {least.hit_rate:.2f} | "
                f"{aware.utilisation:.3f} | {aware.p99 * 1e3:.0f} ms |"
            )


def memory() -> None:
    """Host memory of one server with all models in it, and what the cache of a pool gives up."""
    print("| models | all in host memory | times 4.1 GB | requests/s, all in memory | with a cache of 4.1 GB |")
    print("|---|---|---|---|---|")
    for models in (128, 3700):
        base = Scenario(models=models, cores_per_server=1)
        every = simulate(replace(base, host_cache=float("inf")))
        pool = simulate(base)
        need, rates = host_memory(models), f"{every.throughput:.0f} | {pool.throughput:.0f}"
        print(f"| {models} | {need / GB:.0f} GB | {need / (4.1 * GB):.0f} | {rates} |")


def sharing() -> None:
    """Training that fills the idle share of 16 cores, under an objective of 150 ms for 99 % of the requests."""
    print("| requests/s | busy with requests | training | p99 alone | p99 with training | below 150 ms |")
    print("|---|---|---|---|---|---|")
    for rate in (100, 200, 300, 400):
        base = Scenario(cores_per_server=1, host_cache=0.0, arrivals=float(rate), requests=10_000)
        alone, shared = simulate(base), simulate(replace(base, training_step=50e-3))
        print(
            f"| {rate} | {shared.utilisation:.0%} | {shared.training:.0%} | {alone.p99 * 1e3:.0f} ms | "
            f"{shared.p99 * 1e3:.0f} ms | {'yes' if shared.p99 < 0.15 else 'no'} |"
        )


def grouping() -> None:
    """The published curve of equal groups."""
    stages = Stages(100e9 / 8, 12e9, 50e-6)
    for count in (1, 2, 4, 8, 16, 64, 500):
        print(f"{count:4d} groups  {progress(equal_groups(Layer(240e6, 30e-3), count), stages).compute * 1e3:.1f} ms")


if __name__ == "__main__":
    for table in (grouping, routing, memory, sharing):
        print(f"\n{table.__doc__} Simulated.\n")
        table()
