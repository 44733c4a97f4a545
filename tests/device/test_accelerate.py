"""accelerate and the stock Trainer on the device: what they pick, the CPU's numbers, and every trap they hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from tests.distributed import run_ranks

SCRIPT = Path(__file__).with_name("stock_trainer.py")
TINY = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=64,
)


def tiny_llama(**changes):
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, "tie_word_embeddings": True, **changes}))


def rows(count=32, length=16):
    tokens = torch.randint(0, 96, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(directory, **changes):
    return TrainingArguments(
        **{
            "output_dir": str(directory),
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **changes,
        }
    )


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ------------------------------------------------------------------------------------------------------ what they pick


def test_one_process_is_on_the_first_core(tmp_path):
    assert PartialState().device == torch.device("neuron")
    assert Accelerator().device.type == "neuron"
    assert arguments(tmp_path).device == torch.device("neuron:0")


def picks(rank, world_size):
    accelerator = Accelerator()
    tensor = torch.full((2, 3), float(rank), device=accelerator.device)
    gathered = accelerator.gather(tensor)  # passes a flat output
    padded = accelerator.gather(accelerator.pad_across_processes(torch.ones(rank + 1, 2, device=accelerator.device)))
    metrics = accelerator.gather_for_metrics(torch.ones(2, device=accelerator.device))
    objects = accelerator.gather_for_metrics([{"rank": rank}], use_gather_object=True)
    mean = accelerator.reduce(tensor, "mean")
    return (
        str(accelerator.device),
        accelerator.distributed_type is DistributedType.MULTI_NEURON,
        gathered[:, 0].tolist(),
        tuple(padded.shape),
        metrics.shape[0],
        objects,
        mean.mean().item(),
    )


def test_several_processes_are_multi_neuron_each_on_its_core():
    for rank, (device, kind, gathered, padded, metrics, objects, mean) in enumerate(run_ranks(picks, 2)):
        assert device == f"neuron:{rank}" and kind
        assert gathered == [0.0, 0.0, 1.0, 1.0] and padded == (4, 2) and metrics == 4
        assert objects == [{"rank": 0}, {"rank": 1}] and mean == 0.5


def test_fp16_and_fp8_are_refused_early_with_the_way_out(tmp_path, monkeypatch):
    for precision in ("fp16", "fp8"):
        with pytest.raises(ValueError, match="Use bfloat16: bf16=True in TrainingArguments"):
            Accelerator(mixed_precision=precision)
    with pytest.raises(ValueError, match="fp16 is not for Neuron devices"):
        Trainer(tiny_llama(), arguments(tmp_path, fp16=True), train_dataset=rows())
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    with (
        pytest.warns(UserWarning, match="only supports dtypes of torch.bfloat16"),
        torch.autocast("neuron", torch.float16),
    ):
        pass


# --------------------------------------------------------------------------------------------------------------- traps


def test_moving_a_module_keeps_parameters_ties_and_attributes():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight
    weight.note = "kept"
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    model.to("neuron")
    assert model[0].weight is weight and model[1].weight is weight and weight.note == "kept"
    assert weight.device.type == "neuron" and weight.grad.device.type == "neuron"
    optimizer.step()
    assert torch.equal(model[1].weight.detach().cpu(), before - 1), "an optimizer made before the move still holds it"
    assert model.to("cpu")[0].weight is weight
    model.to(torch.bfloat16).to("neuron", torch.float32)
    assert model[0].weight is model[1].weight is weight
    module = nn.Linear(2, 2, device="meta").to_empty(device="neuron")
    assert module.weight.device.type == "neuron"
    assert nn.Linear(2, 2).neuron().weight.is_neuron


def dropout_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).to("neuron")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_draws_the_same_dropout(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for recompute in (False, True):
        model = dropout_model()
        x = torch.ones(4, 8, device="neuron", requires_grad=True)
        torch.manual_seed(1)
        out = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
        torch.rand(5, device="neuron")  # what comes between forward and backward must not matter
        out.sum().backward()
        gradients.append([x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())])
    assert all(map(torch.equal, *gradients))


def test_accelerate_saves_and_restores_the_random_state(tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare(dropout_model())
    accelerator.save_state(str(tmp_path))
    first = model(torch.ones(2, 8, device="neuron"))
    accelerator.load_state(str(tmp_path))
    assert torch.equal(first, model(torch.ones(2, 8, device="neuron")))


def test_resuming_a_stock_trainer_draws_the_same_dropout(tmp_path):
    def trainer():
        model = tiny_llama(attention_dropout=0.5)
        return Trainer(model, arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=rows())

    whole = trainer()
    whole.train()
    states = torch.load(tmp_path / "checkpoint-2" / "rng_state.pth", weights_only=False)
    assert states["neuron"].numel() == 16
    torch.manual_seed(99)
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(resumed) == history(whole), "the log of the first two steps comes from the checkpoint"


def test_pinned_batches_reach_the_device():
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True)
    batches = [batch for batch in loader]
    assert all(batch.is_pinned() for batch in batches)
    moved = batches[1].to("neuron", non_blocking=True)
    assert moved.cpu().tolist() == [4.0, 5.0, 6.0, 7.0] and not moved.is_pinned()


# ---------------------------------------------------------------------------------------------- the stock Trainer


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_equals_the_cpu(tmp_path, bf16):
    losses = {}
    for use_cpu in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = Trainer(tiny_llama(), arguments(tmp_path, use_cpu=use_cpu, bf16=bf16), train_dataset=rows())
        trainer.train()
        losses[use_cpu] = history(trainer), history(trainer, "grad_norm")
        assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
        assert next(trainer.model.parameters()).device.type == ("cpu" if use_cpu else "neuron")
    for on_cpu, on_neuron in zip(losses[True], losses[False], strict=True):
        assert on_neuron == pytest.approx(on_cpu, rel=1e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("family", ["llama", "gelu"])
def test_autocast_trains_in_bfloat16(family):
    torch.manual_seed(0)
    if family == "llama":
        model = tiny_llama()
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32))
    model.to("neuron")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 96, (4, 16)).to("neuron")
    losses = []
    for _ in range(20):
        with torch.autocast("neuron"):
            output = model(input_ids=tokens, labels=tokens)
            assert output.logits.dtype == torch.bfloat16
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0] * 0.8


def launch(*command, check=True, **environment):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "OPTIMUM_TRN_", "LOCAL_"))}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert not check or done.returncode == 0, done.stderr[-6000:]
    return done


def test_an_unmodified_script_runs_on_one_core_two_cores_and_tensor_parallel(tmp_path):
    """The stock Trainer with OPTIMUM_TRN_AUTOLOAD=1, data parallel and DistributedConfig(tp_size=2)."""
    tiny_llama().save_pretrained(tmp_path / "model")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    runs = {
        "cpu": ((), (), {"ACCELERATE_USE_CPU": "1"}),
        "one": ((), (), {"OPTIMUM_TRN_AUTOLOAD": "1"}),
        "two": (torchrun, (), {"OPTIMUM_TRN_AUTOLOAD": "1"}),
        "tp": (torchrun, ("tp",), {"OPTIMUM_TRN_AUTOLOAD": "1"}),
    }
    reports = {}
    for name, (launcher, modes, environment) in runs.items():
        report = tmp_path / f"{name}.json"
        launch(*launcher, SCRIPT, tmp_path / "model", tmp_path / name, report, *modes, **environment)
        reports[name] = json.loads(report.read_text())
    kinds = {name: (report["device"], report["kind"].partition(".")[2]) for name, report in reports.items()}
    assert kinds == {
        "cpu": ("cpu", "NO"),
        "one": ("neuron:0", "NO"),
        "two": ("neuron:0", "MULTI_NEURON"),
        "tp": ("neuron:0", "MULTI_NEURON"),
    }
    expected = reports.pop("cpu")
    for name, report in reports.items():
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-4), name
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-3), name
        assert report["tied"], name
        if name != "tp":
            assert report["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-4), name
