"""`consolidate` makes a stock directory of a training checkpoint, and nothing of one that is damaged."""

from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from optimum_trn import consolidate
from optimum_trn.cli import main
from optimum_trn.errors import CheckpointError
from tests.distributed import run_ranks
from tests.trainer.test_saving import trainer


def checkpoints(rank, world_size, directory, options):
    run = trainer(directory, max_steps=2, save_total_limit=None, **options)
    run.train()
    run.save_model(str(Path(directory, "result")))


def test_the_weights_of_two_ranks_become_a_directory_that_transformers_loads(tmp_path, capsys):
    run_ranks(checkpoints, 2, str(tmp_path), dict(tensor_parallel_size=2))
    main(["consolidate", str(tmp_path), str(tmp_path / "out")])
    assert "is the model of" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    result = load_file(tmp_path / "result" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in result.items())
    with pytest.raises(CheckpointError, match="is there already"):
        consolidate(tmp_path / "checkpoint-1", tmp_path / "out")
    consolidate(tmp_path / "checkpoint-1", "memory://consolidated")
    assert fsspec.filesystem("memory").exists("/consolidated/model.safetensors")

    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        consolidate(tmp_path / "checkpoint-1", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(SystemExit) as stop:
        main(["consolidate", str(tmp_path / "checkpoint-9"), str(tmp_path / "other")])
    assert stop.value.code == 2
    assert "there is no such directory" in capsys.readouterr().err
