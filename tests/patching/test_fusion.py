"""`fuse_qkv` and `fuse_gate_up`: fewer products, the same numbers, the same names, shapes and files."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.families import families
from tests.models.parity import deviation
from tests.models.proof import Proof
from tests.models.tiny import batch, tiny_model
from tests.patching.test_primitives import Calls

EXACT = 1e-9
BOTH = dict(fuse_qkv=True, fuse_gate_up=True)
ODD = dict(
    attention_bias=True,
    mlp_bias=True,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=1,
    intermediate_size=97,
)


def products(model, rows):
    with Calls(F.linear) as calls:
        model(**rows)
    return calls.count


def trained(rank, world_size, overrides, steps):
    return deviation(tiny_model("llama", torch.float64, **overrides), world_size, steps=steps, **BOTH)


@pytest.mark.parametrize("overrides", [{}, ODD], ids=["even", "shared key head, padding"])
def test_a_fused_model_trains_as_in_one_process(overrides):
    for result in run_ranks(trained, 2, overrides, 20, device="cpu", environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


def one_process(tmp_path):
    stock = tiny_model("llama", torch.float32, attention_bias=True)
    rows = batch(stock)
    fused = copy.deepcopy(stock)
    patch_model(fused, ParallelConfig(**BOTH))
    return stock, fused, rows


def test_one_process_fuses_too_and_files_are_those_of_the_stock_model(tmp_path):
    stock, fused, rows = one_process(tmp_path)
    assert products(stock, rows) - products(fused, rows) == 2 * (2 + 1)
    attention = fused.model.layers[0].self_attn
    storages = {getattr(attention, name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj")}
    assert len(storages) == 1, "the weights are to lie in one piece"
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (stock, fused)]
    for _ in range(3):
        losses = []
        for model, optimizer in zip((stock, fused), optimizers, strict=True):
            loss = model.train()(**rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, tensor in fused.state_dict().items():
        torch.testing.assert_close(tensor, stock.state_dict()[name], rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused(**rows).loss
    loss.backward()
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), fused.double().float()):
        assert torch.equal(twin.eval()(**rows).logits, fused.eval()(**rows).logits)
    type(fused).save_pretrained(fused, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in fused.state_dict().items())
    unpatch_model(fused)
    assert state_of(fused) is None and products(fused, rows) == products(stock, rows)


def prove(rank, world_size, model_types):
    config = ParallelConfig(world_size, fuse_qkv=True)
    mesh = config.build_mesh()
    results = {}
    for model_type in model_types:
        one = Proof(model_type)
        for field in BOTH:
            try:
                results[model_type, field] = one.of(ParallelConfig(world_size, **{field: True}), mesh)
            except PlanError as error:
                results[model_type, field] = str(error)
    return results


@pytest.mark.parametrize(
    "model_types",
    [["bart", "gpt2", "deepseek_v3"], *(pytest.param(families()[i::4], marks=pytest.mark.full) for i in range(4))],
)
def test_every_family_is_its_stock_self_or_has_nothing_to_fuse(model_types):
    for results in run_ranks(prove, 2, model_types, device="cpu", environment=FLOAT64, timeout=400):
        for (model_type, field), result in results.items():
            if isinstance(result, str):
                assert f"{model_type} has no" in result and f"Leave {field} off" in result
            else:
                assert result["error"] < EXACT, (model_type, field, result)
    assert len({type(result) for result in results.values()}) == 2


def load_and_save(rank, world_size, source, target):
    model = NeuronModelForCausalLM.from_pretrained(source, ParallelConfig(world_size, **BOTH))
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]], device=model.device))
    model.save_pretrained(target)


def test_a_fused_sharded_model_saves_the_bytes_it_was_loaded_from(tmp_path):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path / "stock")
    run_ranks(load_and_save, 2, str(tmp_path / "stock"), str(tmp_path / "ours"), device="cpu")
    for path in (tmp_path / "stock").iterdir():
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name


def test_what_takes_weights_apart_is_refused_together_with_it():
    with pytest.raises(MeshError, match="leave one of them out"):
        ParallelConfig(mics_partition_size=2, fuse_qkv=True)
