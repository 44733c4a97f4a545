"""`save_state` and `load_state` of an accelerator in a loop of one's own, with a sharded model, at two layouts."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from optimum_trn.errors import CheckpointError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model
from optimum_trn.trainer.accelerator import DataParallelAccelerator
from tests.distributed import run_ranks
from tests.trainer import scenario


def prepared(tensor_parallel_size, rows):
    """An accelerator, a model, its optimizer and the batches, prepared for two ranks."""
    config = ParallelConfig(tensor_parallel_size=tensor_parallel_size)
    accelerator = Accelerator(cpu=True)
    mesh = config.build_mesh("cpu")
    DataParallelAccelerator.adopt(accelerator, mesh, config)
    model = scenario.llama()
    patch_model(model, config, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows_of_equal_weight = [{**row, "labels": row["input_ids"]} for row in scenario.rows(8)]
    loader = DataLoader(rows_of_equal_weight, batch_size=rows)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def steps(accelerator, model, optimizer, loader):
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def saved_and_loaded(rank, world_size, directory):
    at_two = prepared(2, 2)
    steps(*at_two)
    at_two[0].save_state(directory)
    expected = steps(*at_two)
    again = prepared(2, 2)
    again[0].load_state(directory)
    same = steps(*again)
    replicated = prepared(1, 1)
    replicated[0].load_state(directory)
    other = steps(*replicated)
    torch.distributed.barrier()
    if rank == 0:
        Path(directory, "scheduler.bin").write_bytes(b"")  # a file that was not there is no damage
        Path(directory, "optimizer.safetensors").write_bytes(b"cut short")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="optimizer.safetensors has 9 bytes"):
        again[0].load_state(directory)
    return expected, same, other


def test_a_loop_goes_on_where_it_was_saved_at_the_same_layout_and_at_another(tmp_path):
    for expected, same, other in run_ranks(saved_and_loaded, 2, str(tmp_path / "state"), device="cpu"):
        assert same == expected
        assert other == pytest.approx(expected, rel=1e-5)
    assert {"model.safetensors", "optimizer.safetensors", "checkpoint.json"} <= {
        path.name for path in (tmp_path / "state").iterdir()
    }
