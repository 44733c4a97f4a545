"""Models by Hub id: each host downloads each file once, ranks agree about failures, and nothing runs unasked."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_trn.errors import CheckpointError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from tests.devices import local_device
from tests.distributed import run_ranks
from tests.hub import TOKEN, Hub, online
from tests.trainer.scenario import llama, rows

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""

LOADS = {
    "sharded files": dict(),
    "a revision": dict(revision="v2"),
    "a folder": dict(subfolder="inner"),
    "a variant": dict(variant="fp16"),
}
REFUSED = {
    "private without a token": ("somebody/private", {}, "private"),
    "pickled": ("somebody/pickled", {}, "safetensors"),
    "code": ("somebody/coded", {}, "trust_remote_code"),
    "not there": ("somebody/nothing", {}, "somebody/nothing"),
}


def saved(directory, seed, **options):
    model = llama()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.max_length = 10 + seed
    model.save_pretrained(directory, **options)
    return directory


def publish(hub, tmp_path):
    """The repositories of the test; a pickle lies beside every one of them."""
    local = {
        "a variant": saved(tmp_path / "fp16", 4, variant="fp16"),
        "sharded files": saved(tmp_path / "main", 1, max_shard_size="20KB"),
        "a revision": saved(tmp_path / "v2", 2),
        "a folder": saved(tmp_path / "inner", 3),
    }
    assert len(list(local["sharded files"].glob("model-*.safetensors"))) > 2
    for name, directory in local.items():
        torch.save({}, directory / "pytorch_model.bin")
        under = {"a folder": "inner"}.get(name, "")
        hub.add("somebody/tiny", directory, "v2" if name == "a revision" else "main", under)
    for name in ("private", "pickled", "coded"):
        shutil.copytree(local["a revision"], tmp_path / name)
    hub.private.add("somebody/private")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    marker = tmp_path / "code has run"
    (tmp_path / "coded" / "own.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    for name in ("private", "pickled", "coded"):
        hub.add(f"somebody/{name}", tmp_path / name)
    return local, marker


def loss_of(model, device="cpu"):
    batch = {name: torch.stack([row[name] for row in rows(2)]).to(device) for name in ("input_ids", "labels")}
    return model(**batch).loss.item(), model.generation_config.max_length


def load_all(rank, world_size, endpoint, cache):
    config = ParallelConfig(tensor_parallel_size=2)

    def load(name, **options):
        return NeuronModelForCausalLM.from_pretrained(name, config, cache_dir=cache, **options)

    losses, refusals = {}, {}
    with online(endpoint):
        for what, options in LOADS.items():
            losses[what] = loss_of(load("somebody/tiny", **options), local_device())
        for what, (name, options, _) in REFUSED.items():
            with pytest.raises((OSError, ValueError, CheckpointError)) as error:
                load(name, **options)
            refusals[what] = str(error.value)
        losses["a token"] = loss_of(load("somebody/private", token=TOKEN), local_device())
    losses["offline"] = loss_of(load("somebody/tiny"), local_device())  # no rank of the tests reaches the network
    return losses, refusals


@pytest.mark.parametrize("device", ["neuron", pytest.param("cpu", marks=pytest.mark.full)])
def test_a_host_downloads_once_and_offline_reads_its_cache(tmp_path, device):
    with Hub() as hub:
        local, marker = publish(hub, tmp_path)
        ranks = run_ranks(load_all, 2, hub.endpoint, str(tmp_path / "cache"), device=device)
    expected = {}
    for name, directory in local.items():
        variant = {"variant": "fp16"} if name == "a variant" else {}
        expected[name] = loss_of(AutoModelForCausalLM.from_pretrained(directory, **variant))
    expected["a variant"] = (expected["a variant"][0], expected["sharded files"][1])  # which lie side by side
    expected |= {"a token": expected["a revision"], "offline": expected["sharded files"]}
    for losses, refusals in ranks:
        for name, (loss, max_length) in expected.items():
            assert losses[name][0] == pytest.approx(loss, rel=1e-5), name
            assert losses[name][1] == max_length, f"{name}: the generation config"
        for name, (_, _, text) in REFUSED.items():
            assert text in refusals[name], name
    weights = {name: count for name, count in hub.downloads.items() if name.endswith(".safetensors")}
    assert len(weights) == len(list(local["sharded files"].glob("*.safetensors"))) + 3
    # The same name in two repositories or revisions; one host has two ranks here.
    assert all(count == (2 if name == "model.safetensors" else 1) for name, count in weights.items()), weights
    assert not any(name.endswith(".bin") for name in hub.downloads)
    assert not marker.exists()
