"""Collectives of the process group `neuron` over NeuronLink against gloo on CPU tensors: same processes, alternating.

    python benchmarks/collectives.py                    # 2 ranks on 2 cores, one thread each
    python benchmarks/collectives.py --ranks 4          # more ranks than cores
    python benchmarks/collectives.py --write docs/performance.md

Runs of calls alternate between the two and count with their slowest rank. The table holds medians, the ratio of the
medians, and the quartiles of the ratio over neighbouring runs; all of it was measured, nothing simulated.
"""

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

KIB, MIB = 1 << 10, 1 << 20
CORES = 2
CASES = (
    [("all_reduce", size) for size in (16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)]
    + [("all_gather_into_tensor", size) for size in (256 * KIB, 16 * MIB, 32 * MIB)]
    + [("reduce_scatter_tensor", 16 * MIB), ("all_to_all_single", 16 * MIB), ("broadcast", 16 * MIB)]
)
"""Collectives, and the bytes of the larger of their tensors."""
TARGETS = {
    ("all_reduce", 16 * KIB): 20.0,
    ("all_reduce", 256 * KIB): 6.0,
    ("all_reduce", MIB): 6.0,
    ("all_reduce", 4 * MIB): 8.0,
    ("all_reduce", 16 * MIB): 8.0,
    ("all_gather_into_tensor", 16 * MIB): 10.0,
    ("all_gather_into_tensor", 32 * MIB): 10.0,  # 16 MiB from each of two
}
"""How many times as fast as gloo on two ranks they have to be."""
PASSES = 1.5
"""The most that an all-reduce of 16 MiB may take, in copies of a tensor of that size that all ranks make at once."""


def call(name: str, size: int, device: str, group: dist.ProcessGroup) -> Callable[[], object]:
    """The collective on float32 tensors of `device`, as a function of nothing."""
    whole = torch.ones(size // 4, device=device)
    part = torch.ones(size // 4 // group.size(), device=device)
    if name == "copy":
        other = torch.ones_like(whole)
        return lambda: other.copy_(whole)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    if name == "all_to_all_single":
        other = torch.ones_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    function = getattr(dist, name)
    first, second = (part, whole) if name == "reduce_scatter_tensor" else (whole, part)
    return lambda: function(first, second, group=group)


def seconds(calls: list[Callable[[], object]], repetitions: int, run: int) -> list[list[float]]:
    """Times of each call on the slowest rank, in turns: means of `run` calls in a row, from a barrier on."""
    times = torch.zeros(len(calls), repetitions + 2, dtype=torch.float64)
    for repetition in range(repetitions + 2):
        for number, function in enumerate(calls):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(run):
                function()
            times[number, repetition] = (time.perf_counter() - started) / run
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return [row[2:].tolist() for row in times]


def quartiles(values: list[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(values, n=4)
    return lower, upper


def measure(rank: int, world_size: int, port: int, results: "multiprocessing.SimpleQueue[list[str]]") -> None:
    """One rank; rank 0 reports the lines of the table."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(1)
    import optimum_trn  # noqa: F401  (installs the device)

    dist.init_process_group("neuron")
    gloo = dist.new_group(backend="gloo")
    world = dist.group.WORLD
    assert world is not None
    lines = []
    for name, size in CASES:
        linked, carried = seconds(
            [call(name, size, "neuron", world), call(name, size, "cpu", gloo)], 15, 100 if size < 4 * MIB else 5
        )
        ratio = statistics.median(carried) / statistics.median(linked)
        low, high = quartiles([b / a for a, b in zip(linked, carried, strict=True)])
        target = TARGETS.get((name, size)) if world_size == 2 else 1.0
        verdict = "" if target is None else f"{target:.0f} {'met' if ratio >= target else 'MISSED'}"
        text = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        lines.append(
            f"| {name} | {text} | {statistics.median(linked) * 1e3:.3f} | {statistics.median(carried) * 1e3:.3f} "
            f"| {ratio:.1f} | {low:.1f}-{high:.1f} | {verdict} |"
        )
    reduced, copied = seconds([call(name, 16 * MIB, "neuron", world) for name in ("all_reduce", "copy")], 15, 5)
    passes = statistics.median(reduced) / statistics.median(copied)
    low, high = quartiles([a / b for a, b in zip(reduced, copied, strict=True)])
    verdict = f"at most {PASSES} {'met' if passes <= PASSES else 'MISSED'}" if world_size == 2 else ""
    lines.append(
        f"| all_reduce against a copy | 16 MiB | {statistics.median(reduced) * 1e3:.3f} "
        f"| {statistics.median(copied) * 1e3:.3f} (copy) | {passes:.2f} passes | {low:.2f}-{high:.2f} | {verdict} |"
    )
    if rank == 0:
        results.put(lines)
    dist.destroy_process_group()


def table(world_size: int) -> str:
    """The section of docs/performance.md for `world_size` ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    multiprocessing.spawn(measure, (world_size, store.port, results), nprocs=world_size)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return "\n".join(
        [
            f"### {world_size} ranks on {CORES} cores\n",
            f"Commit {commit or 'unknown'}, float32, one thread per rank. Times in ms, medians.\n",
            "| Collective | Size | NeuronLink | gloo | Times as fast | Quartiles | At least |",
            "|---|---|---|---|---|---|---|",
            *results.get(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--write", type=Path, help="replace the section of collectives in this file")
    arguments = parser.parse_args()
    text = "\n\n".join(table(ranks) for ranks in arguments.ranks)
    print(text)
    if arguments.write:
        begin, end = "<!-- collectives -->\n", "<!-- /collectives -->\n"
        before, _, rest = arguments.write.read_text().partition(begin)
        arguments.write.write_text(before + begin + text + "\n" + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
