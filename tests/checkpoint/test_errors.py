"""A user's mistake or a damaged file is one paragraph on every rank, and no rank waits for another."""

import os
import socket
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimum_trn.checkpoint import load, slices
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from tests.checkpoint.stock_files import saved
from tests.devices import NEURON_FIRST
from tests.distributed import REPOSITORY, run_ranks


def messages(rank, world_size, cases):
    """What each load raises, as (class, text); the ranks must still be in step after all of them."""
    said = []
    for directory, size, kwargs in cases:
        with pytest.raises((ValueError, OSError)) as error:
            NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(size), **kwargs)
        said.append((type(error.value).__name__, str(error.value)))
    torch.distributed.barrier()
    return said


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_each_bad_input_is_named_with_its_numbers_on_every_rank(tmp_path, device):
    good = tmp_path / "good"
    saved(good)
    damaged = {}
    for name in ("missing file", "truncated", "missing shard", "other shape", "no plan", "one head"):
        damaged[name] = tmp_path / name.replace(" ", "_")
        saved(damaged[name], max_shard_size="30KB" if name == "missing shard" else "50GB")
    (damaged["missing file"] / "model.safetensors").unlink()
    weights = damaged["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    next(damaged["missing shard"].glob("model-00002-of-*")).unlink()
    weights = damaged["other shape"] / "model.safetensors"
    save_file({**load_file(weights), "lm_head.weight": torch.zeros(52, 40)}, weights, metadata={"format": "pt"})
    saved(damaged["no plan"], "mamba")
    saved(damaged["one head"], num_attention_heads=1, num_key_value_heads=1)

    cases = [
        (damaged["missing file"], 2, {}, "OSError", ["no file named model.safetensors"]),
        (damaged["truncated"], 2, {}, "CheckpointError", ["model.safetensors cannot be read", "bytes", "get it again"]),
        (damaged["missing shard"], 2, {}, "CheckpointError", ["model-00002-of-", "is missing"]),
        (damaged["other shape"], 2, {}, "CheckpointError", ["lm_head.weight", "(52, 40)", "(104, 40)"]),
        (damaged["no plan"], 2, {}, "UnsupportedModelError", ["mamba", "recognised", "tensor_parallel_size=1"]),
        (damaged["one head"], 2, {}, "PlanError", ["tensor_parallel_size 2", "num_attention_heads 1"]),
        (good, 3, {}, "MeshError", ["3", "world size 2"]),
        (good, 2, {"device_map": "auto"}, "CheckpointError", ["device_map", "parallel layout"]),
        (good, 2, {"tp_plan": "auto"}, "CheckpointError", ["tp_plan", "ParallelConfig"]),
        (good, 2, {"gguf_file": "a.gguf"}, "CheckpointError", ["gguf_file", "convert_gguf.py"]),
        (tmp_path / "nothing", 2, {}, "CheckpointError", ["nothing does not exist"]),
    ]
    for said in run_ranks(
        messages, 2, [(str(directory), size, kwargs) for directory, size, kwargs, _, _ in cases], device=device
    ):
        for (kind, text), (directory, _, _, expected_kind, words) in zip(said, cases, strict=True):
            assert kind == expected_kind, (directory, text)
            assert all(word in text for word in words), (directory, text)
            assert "\n" not in text.strip() or kind == "OSError", text


def one_rank_cannot_read(rank, world_size, directory):
    opened = slices.open_slices

    def broken(files):
        if rank == 1:
            raise OSError(5, "Input/output error")
        return opened(files)

    with patch.object(load, "open_slices", broken), pytest.raises((ValueError, OSError)) as error:
        NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(2))
    NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(2))  # the ranks are still in step
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_what_fails_on_one_rank_fails_on_all_of_them(tmp_path, device):
    saved(tmp_path)
    kinds, texts = zip(*run_ranks(one_rank_cannot_read, 4, str(tmp_path), device=device), strict=True)
    assert kinds == ("CheckpointError", "OSError", "CheckpointError", "CheckpointError")
    assert all("Input/output error" in text for text in texts)
    assert all("failed on rank 1" in text for text in (texts[0], texts[2], texts[3]))


SCRIPT = """
import sys, torch.distributed as dist
import optimum_trn
from optimum_trn import NeuronModelForCausalLM, ParallelConfig
dist.init_process_group("neuron")
NeuronModelForCausalLM.from_pretrained(sys.argv[1], ParallelConfig(2))
"""


def test_a_launched_script_ends_with_an_exit_code(tmp_path):
    saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={
                **os.environ,
                # Threads of torch's own gloo may abort a process that ends after a collective (see csrc/work.cpp).
                "OPTIMUM_TRN_DEVICE": "neuron",
                "PYTHONPATH": str(REPOSITORY),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 1, said
        assert "CheckpointError" in said and "get it again" in said
