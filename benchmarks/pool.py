"""Measures a pool on this host: `python benchmarks/pool.py`, on an otherwise idle machine.

Four stores, each a process behind an emulated link of 25 MB/s, and a GPT-2-like model of 64 MB. The links are emulated,
the rest is measured: when the first layer has run, load and forward together, the ways to spread a model over stores,
and a store that is killed with -9 while it sends. `--check` fails where the promises of docs/pool.md are not kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from optimum_trn import NeuronModelForCausalLM
from optimum_trn.pool import Pool, put_directory, stream_model
from optimum_trn.pool.grouping import Stages
from optimum_trn.pool.placement import STRATEGIES
from optimum_trn.pool.serve import PoolProcesses
from optimum_trn.pool.streaming import StreamedModel

STORES, RATE = 4, 25_000_000
IDS = torch.arange(64).reshape(1, 64)


def save_model(directory: Path) -> None:
    """A GPT-2 of 16 million parameters in float32."""
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=4000, n_positions=256, n_embd=384, n_layer=8, n_head=6, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(directory)


class Run:
    """One load and forward, and what happened in it."""

    def __init__(self, pool: Pool, name: str, kill: int | None = None) -> None:
        begin = time.perf_counter()
        stages = Stages(STORES * RATE, 12e9, network_latency=1e-3)
        self.streamed: StreamedModel = stream_model(name, pool=pool, stages=stages, start=False)
        self.build = time.perf_counter() - begin
        model = self.streamed.model.eval()
        ids = IDS.to(model.device)
        self.arrived_at_first_layer = 0.0

        def first_layer(module: object, args: object, output: object) -> None:
            self.arrived_at_first_layer = self.arrived_at_first_layer or self.streamed.arrived / self.streamed.total
            if kill is not None:
                os.kill(kill, signal.SIGKILL)

        handle = model.transformer.h[0].register_forward_hook(first_layer)
        begin = time.perf_counter()
        with torch.no_grad():
            self.streamed.start()
            self.logits = model(ids).logits.cpu()
        self.total = time.perf_counter() - begin
        handle.remove()
        self.fetch = self.streamed.times["fetched"] - self.streamed.times["start"]
        self.first_group = self.streamed.times["first group"] - self.streamed.times["start"]
        begin = time.perf_counter()
        with torch.no_grad():
            model(ids)
        self.compute = time.perf_counter() - begin

    @property
    def bound(self) -> float:
        """1.15 times the slowest stage, and the first group."""
        return 1.15 * max(self.fetch, self.streamed.copy_seconds, self.compute) + self.first_group

    def __str__(self) -> str:
        return (
            f"first layer at {self.arrived_at_first_layer:4.0%} of the bytes; load and forward {self.total:.3f} s "
            f"(bound {self.bound:.3f}); fetch {self.fetch:.3f}, copy {self.streamed.copy_seconds:.3f}, compute "
            f"{self.compute:.3f}, first group {self.first_group:.3f}; {len(self.streamed.groups)} groups; "
            f"skeleton before it {self.build:.3f} s"
        )


def main() -> None:
    """Measure, print, and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary, "model")
        save_model(directory)
        size = (directory / "model.safetensors").stat().st_size
        print(f"{size / 1e6:.1f} MB, {STORES} stores behind emulated links of {RATE / 1e6:.0f} MB/s")
        with PoolProcesses(STORES, 1 << 30, rate=RATE) as processes, Pool(processes.address) as pool:
            expected = NeuronModelForCausalLM.from_pretrained(directory).eval()
            with torch.no_grad():
                logits = expected(IDS.to(expected.device)).logits.cpu()
            stock = AutoModelForCausalLM.from_pretrained(directory).eval()
            with torch.no_grad():
                difference = (stock(IDS).logits - logits).abs().max()
            print(f"from_pretrained on the CPU and on the core differ by {difference:.1g} in the logits")
            runs = {}
            for strategy in STRATEGIES:
                put_directory(pool, directory, strategy, strategy)
                runs[strategy] = Run(pool, strategy)
                assert torch.equal(runs[strategy].logits, logits), strategy
                print(f"{strategy:11s} {runs[strategy]}")
            hybrid = runs["hybrid"]
            ratio = hybrid.total / runs["application"].total
            print(f"hybrid takes {ratio:.3f} of the time of per application; all logits bit-equal to from_pretrained")
            put_directory(pool, directory, "replicated", replicas=2)
            for path in directory.iterdir():
                path.rename(f"{path}.moved")  # so that only the replica can help
            killed = Run(pool, "replicated", kill=processes.pids[1])
            assert torch.equal(killed.logits, logits) and set(pool.lost) == {1}
            print(f"store 1 killed with -9 after the first layer, replicas=2: {killed.total:.3f} s, equal")
        if check:
            assert hybrid.arrived_at_first_layer < 0.4
            assert hybrid.total <= hybrid.bound
            assert ratio <= 0.35


if __name__ == "__main__":
    main()
