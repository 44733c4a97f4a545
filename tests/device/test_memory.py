"""HBM: one arena per core, a hard limit, errors that say what is full, and memory that goes back to the host."""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import optimum_trn  # noqa: F401
from optimum_trn.device.build import load_extension
from optimum_trn.errors import NeuronOutOfMemoryError

MiB = 2**20
extension = load_extension()


def stats(device: int = 0) -> dict[str, int]:
    torch.empty(0, device=f"neuron:{device}").resize_(1)  # the arena comes with the first block
    return extension.arena_stats(device)


@pytest.fixture
def limited():
    """Core 0 with 64 MiB more than what it holds now."""
    torch.zeros(1, device="neuron:0")
    gc.collect()
    total = torch.neuron.get_device_properties(0).total_memory
    extension.set_limit(0, stats()["tensor_bytes"] + 64 * MiB)
    yield 64 * MiB
    extension.set_limit(0, total)


def test_blocks_are_reused_and_coalesce():
    torch.neuron.empty_cache()
    before = stats()["tensor_bytes"]
    parts = [torch.empty(MiB, dtype=torch.uint8, device="neuron") for _ in range(8)]
    reserved = stats()["reserved_bytes"]
    del parts
    assert stats()["tensor_bytes"] == before
    whole = torch.empty(8 * MiB, dtype=torch.uint8, device="neuron")  # fits where the eight were
    assert stats()["reserved_bytes"] == reserved
    del whole


def test_best_fit_leaves_the_large_hole_alone():
    hold = [torch.empty(n, dtype=torch.uint8, device="neuron") for n in (4 * MiB, 512, 2 * MiB, 512)]
    addresses = [x.data_ptr() for x in hold]
    hold[0] = hold[2] = None
    again = torch.empty(2 * MiB, dtype=torch.uint8, device="neuron")
    assert again.data_ptr() == addresses[2]


def test_fragmentation_of_a_training_loop_stays_small():
    torch.neuron.empty_cache()
    torch.neuron.reset_peak_memory_stats()
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)]).to("neuron")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(30):
        model(torch.randn(64 + step, 300, device="neuron")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stats()["reserved_peak"] <= 1.07 * (stats()["tensor_peak"] + stats()["scratch_peak"])


def test_outputs_and_temporaries_of_operators_lie_in_the_arena():
    x = torch.randn(1000, 1000, device="neuron")
    before = stats()["tensor_bytes"]
    y = x @ x
    z = torch.sort(y, dim=1)
    assert (
        stats()["tensor_bytes"] - before == 4_000_256 * 2 + 8_000_000 + 0 * len(z)
        or stats()["tensor_bytes"] > before + 15_000_000
    )
    low, high = sorted((x.data_ptr(), y.data_ptr()))
    assert high - low < 2**38  # one address range per core
    del y, z
    assert stats()["tensor_bytes"] == before


def test_statistics_of_torch_accelerator():
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, dtype=torch.uint8, device="neuron")
    assert torch.accelerator.memory_allocated() - before == 1024  # blocks are multiples of 512 bytes
    assert torch.accelerator.max_memory_allocated() >= before + 1024
    assert torch.neuron.memory_reserved() >= torch.neuron.memory_allocated()
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.memory_stats()["allocation.all.current"] >= 0
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before
    free, total = torch.neuron.mem_get_info()
    assert 0 < free <= total == torch.neuron.get_device_properties().total_memory


def test_cores_are_accounted_apart():
    before = [torch.neuron.memory_allocated(i) for i in range(2)]
    x = torch.empty(MiB, device="neuron:1")
    assert torch.neuron.memory_allocated(0) == before[0]
    assert torch.neuron.memory_allocated(1) == before[1] + 4 * MiB
    assert x.device.index == 1 and (x + 1).device.index == 1


def test_the_limit_raises_with_a_table_and_changes_nothing(limited):
    model = nn.Linear(1000, 1000).to("neuron")
    model(torch.ones(4, 1000, device="neuron")).sum().backward()
    held = stats()["tensor_bytes"]
    with pytest.raises(NeuronOutOfMemoryError, match=" out of memory.") as caught:
        torch.empty(65 * MiB, dtype=torch.uint8, device="neuron")
    text = str(caught.value)
    for word in (
        "parameters",
        "gradients",
        "optimizer states",
        "limit",
        "requested",
        "65.000 MiB",
        "usage: tensors",
        "gradient checkpointing",
    ):
        assert word in text, text
    assert isinstance(caught.value, torch.OutOfMemoryError) and len(caught.value.args) == 1
    del caught
    assert stats()["tensor_bytes"] == held and stats()["scratch_bytes"] == 0
    torch.empty(32 * MiB, dtype=torch.uint8, device="neuron")  # what fits still fits


def test_the_limit_holds_inside_kernels_and_resizes(limited):
    x = torch.ones(3000, 1000, device="neuron")
    for request in (
        lambda: x @ x.t() @ x,
        lambda: torch.cat([x] * 6),
        lambda: torch.empty(0, device="neuron").resize_(20 * MiB),
    ):
        with pytest.raises(NeuronOutOfMemoryError):
            keep = [request() for _ in range(8)]
            del keep
    assert stats()["scratch_bytes"] == 0


def test_running_out_at_any_point_of_a_step_leaves_nothing_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 32), nn.LayerNorm(32)).to(
        "neuron"
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 3, 16, 16, device="neuron")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    held, total = stats()["tensor_bytes"], torch.neuron.get_device_properties(0).total_memory
    failed = 0
    try:
        for room in range(0, 4 * MiB, 64 * 1024):
            extension.set_limit(0, held - stats()["tensor_bytes"] * 0 + room)
            try:
                step()
            except NeuronOutOfMemoryError:
                failed += 1
    finally:
        extension.set_limit(0, total)
    gc.collect()
    assert 0 < failed
    assert stats()["scratch_bytes"] == 0 and stats()["tensor_bytes"] <= held


def test_a_full_host_is_called_the_host():
    total = torch.neuron.get_device_properties(0).total_memory
    torch.zeros(1, device="neuron:0")
    extension.set_limit(0, 2**38)
    try:
        with pytest.raises(NeuronOutOfMemoryError, match="host.* out of memory.") as caught:
            torch.empty(2**38 - 2**31, dtype=torch.uint8, device="neuron:0")
    finally:
        extension.set_limit(0, total)
    assert "is the host" in str(caught.value)


def test_empty_cache_gives_pages_back():
    def held_by_host() -> int:
        return os.fstat(stats()["fd"]).st_blocks * 512

    x = torch.ones(32 * MiB, dtype=torch.uint8, device="neuron")
    with_x = held_by_host()
    del x
    assert held_by_host() == with_x  # cached
    torch.neuron.empty_cache()
    assert held_by_host() <= with_x - 31 * MiB
    assert (torch.zeros(32 * MiB, dtype=torch.uint8, device="neuron") == 0).all()


def test_fresh_memory_after_punching_holes_is_zero_and_usable():
    x = torch.full((MiB,), 7.0, device="neuron")
    del x
    torch.neuron.empty_cache()
    y = torch.full((MiB,), 3.0, device="neuron")
    assert y.sum().item() == 3 * MiB


def test_pinned_memory():
    x = torch.arange(10.0)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned[3:].is_pinned() and torch.equal(x, pinned)
    assert torch.empty(4, pin_memory=True).is_pinned() and not torch.empty(4).is_pinned()
    moved = pinned.to("neuron", non_blocking=True)
    assert torch.equal(moved.cpu(), x)
    address = pinned.data_ptr()
    del pinned
    assert not extension.is_pinned(address)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(6.0)), batch_size=2, pin_memory=True
    )
    assert all(batch[0].is_pinned() for batch in loader)


def test_host_memory_stays_on_the_host():
    before = stats()["tensor_bytes"] + stats()["scratch_bytes"]
    x = torch.empty(1000)
    assert stats()["tensor_bytes"] + stats()["scratch_bytes"] == before
    assert x.device.type == "cpu"


def test_nothing_is_created_by_importing_counting_and_seeding():
    script = """
        import os, threading
        import torch
        def files():
            paths = [f"/proc/self/fd/{f}" for f in os.listdir("/proc/self/fd")]
            return sorted(os.readlink(path) for path in paths if os.path.islink(path))
        threads = len(os.listdir("/proc/self/task"))
        import optimum_trn
        torch.neuron.is_available(), torch.neuron.device_count(), torch.manual_seed(1)
        assert len(os.listdir("/proc/self/task")) == threads
        assert not any("neuron-hbm" in f for f in files()), files()
        assert not torch.neuron.is_initialized()
        x = torch.ones(3, device="neuron")
        assert any("neuron-hbm" in f for f in files())
        assert not any("neuron" in f for f in os.listdir("/dev/shm"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)
