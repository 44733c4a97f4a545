"""LoRA adapters on sharded layers are those of stock PEFT: values, losses, gradients, files, merging, counts."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model

from optimum_trn.checkpoint import save_pretrained
from optimum_trn.errors import CheckpointError, PlanError
from optimum_trn.parallel import ParallelConfig, RankGroup, clip_grad_norm_
from optimum_trn.parallel.adapters import FactorForward
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.sequence import SequenceGroup
from optimum_trn.patching import patch_model, state_of, unpatch_model
from optimum_trn.patching.adapters import parameter_counts, placements_of
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.tiny import KeepFloat64

EXACT = 1e-9
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
# By name: model type, class, LoraConfig, config.
FAMILIES = {
    "llama": ("llama", "causal", dict(target_modules=LLAMA, use_rslora=True), dict(num_key_value_heads=1)),
    "phi3": ("phi3", "causal", dict(target_modules="all-linear", modules_to_save=["lm_head"]), {}),
    "gpt2": ("gpt2", "causal", dict(target_modules=["c_attn", "c_proj", "c_fc", "wte"]), {}),
    "bert": ("bert", "sequence", dict(target_modules="all-linear", task_type="SEQ_CLS", lora_bias=True), {}),
}


def pair(model_type, kind, options, config, *, patched_first=True, sequence_parallel=False, seed=7):
    """A sharded model with adapters, and its stock twin; each is made as a user makes it."""
    device = local_device()
    model = tiny_class(model_type, kind, torch.float64, **config)
    stock = copy.deepcopy(model)
    torch.manual_seed(seed)
    theirs = get_peft_model(stock, LoraConfig(r=3, lora_alpha=5, **options), autocast_adapter_dtype=False)
    torch.manual_seed(seed)
    layout = ParallelConfig(dist.get_world_size(), sequence_parallel=sequence_parallel)
    if patched_first:
        patch_model(model, layout)
        model.to(device)
    mine = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options), autocast_adapter_dtype=False)
    if not patched_first:
        patch_model(mine.get_base_model(), layout)
        mine.to(device)
    return mine, theirs


def on_device(inputs):
    return {name: v.to(local_device()) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


def error(actual, expected):
    actual, expected = actual.detach().cpu(), expected.detach()
    assert actual.shape == expected.shape and expected.isfinite().all()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


@torch.no_grad()
def logits_error(mine, theirs, inputs):
    training = mine.training, theirs.training
    mine.eval(), theirs.eval()
    found = error(mine(**on_device(inputs)).logits, theirs(**inputs).logits)
    mine.train(training[0]), theirs.train(training[1])
    return found


def whole(model, name, tensor):
    placement = placements_of(model).get(name)
    return tensor if placement is None else unshard_from_group(tensor, placement, state_of(model).tp_group)


def train(mine, theirs, inputs, steps=3):
    """The largest errors of losses, gradients and gradient norms, and the smallest gradient that was compared."""
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (mine, theirs)]
    errors = dict(loss=0.0, gradient=0.0, norm=0.0)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = mine(**on_device(inputs)).loss, theirs(**inputs).loss
        loss.backward(), expected.backward()
        errors["loss"] = max(errors["loss"], error(loss, expected))
        for name, parameter in theirs.named_parameters():
            own = mine.get_parameter(name)
            assert own.requires_grad == parameter.requires_grad, name
            assert (own.grad is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                errors["gradient"] = max(errors["gradient"], error(whole(mine, name, own.grad), parameter.grad))
        trained = [(name, p) for name, p in mine.named_parameters() if p.requires_grad]
        norm = clip_grad_norm_(trained, placements_of(mine), state_of(mine).tp_group, 0.01)
        expected = torch.nn.utils.clip_grad_norm_([p for p in theirs.parameters() if p.requires_grad], 0.01)
        assert expected > 0.01, "clipping is not active"
        errors["norm"] = max(errors["norm"], error(norm, expected))
        for optimizer in optimizers:
            optimizer.step()
    return errors


def assert_equal_on_all_ranks(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, parameter.detach().contiguous())
            assert all(torch.equal(copied, parameter) for copied in copies), name


def life(rank, world_size, directory, family, patched_first, sequence_parallel=False):
    """Everything that an adapter goes through, beside its stock twin."""
    model_type, kind, options, config = FAMILIES[family]
    mine, theirs = pair(*FAMILIES[family], patched_first=patched_first, sequence_parallel=sequence_parallel)
    inputs = class_batch(theirs.get_base_model(), kind)
    for (name, own), (expected_name, expected) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == expected_name
        assert "lora_" not in name or torch.equal(own.detach().cpu(), expected), f"{name} is initialised differently"
    mine.train(), theirs.train()
    with KeepFloat64():
        errors = train(mine, theirs, inputs)
    assert_equal_on_all_ranks(mine)
    assert parameter_counts(mine) == theirs.get_nb_trainable_parameters()
    if "modules_to_save" not in options:
        assert mine.get_nb_trainable_parameters()[0] == theirs.get_nb_trainable_parameters()[0]
    errors["trained"] = logits_error(mine, theirs, inputs)

    stock = tiny_class(model_type, kind, torch.float64, **config)
    mine.save_pretrained(Path(directory, "ours"), is_main_process=rank == 0)
    dist.barrier()
    loaded = PeftModel.from_pretrained(copy.deepcopy(stock), Path(directory, "ours"), autocast_adapter_dtype=False)
    errors["saved"] = logits_error(mine, loaded, inputs)
    if rank == 0:
        theirs.save_pretrained(Path(directory, "theirs"))
    dist.barrier()
    patch_model(stock, ParallelConfig(world_size, sequence_parallel=sequence_parallel))
    loaded = PeftModel.from_pretrained(
        stock.to(local_device()), Path(directory, "theirs"), autocast_adapter_dtype=False
    )
    errors["loaded"] = logits_error(loaded, theirs, inputs)

    with mine.disable_adapter(), theirs.disable_adapter():
        errors["disabled"] = logits_error(mine, theirs, inputs)
    if not options.get("lora_bias"):
        mine.merge_adapter(), theirs.merge_adapter()
        errors["merged"] = logits_error(mine, theirs, inputs)
        mine.unmerge_adapter(), theirs.unmerge_adapter()
        errors["unmerged"] = logits_error(mine, theirs, inputs)
        base = mine.merge_and_unload()
        unpatch_model(base)
        theirs = theirs.merge_and_unload()
        errors["unpatched"] = logits_error(base, theirs, inputs)
        assert {k: v.shape for k, v in base.state_dict().items()} == {
            k: v.shape for k, v in theirs.state_dict().items()
        }
    return errors


def check(results):
    for errors in results:
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize(
    "family, device, tensor_parallel_size, patched_first, sequence_parallel",
    [
        pytest.param("llama", "neuron", 2, True, False),
        pytest.param("llama", "cpu", 2, False, True),
        pytest.param("phi3", "cpu", 2, True, False),
        pytest.param("phi3", "cpu", 3, False, True),  # a rank holds nothing but padding of some layers
        pytest.param("gpt2", "cpu", 2, True, False),
        pytest.param("bert", "cpu", 2, False, False),
        pytest.param("llama", "cpu", 2, True, True, marks=pytest.mark.full),
        pytest.param("phi3", "neuron", 2, False, False, marks=pytest.mark.full),
        pytest.param("gpt2", "cpu", 2, False, True, marks=pytest.mark.full),
        pytest.param("bert", "cpu", 2, True, False, marks=pytest.mark.full),
        pytest.param("llama", "neuron", 3, False, True, marks=pytest.mark.full),
        pytest.param("gpt2", "neuron", 3, True, True, marks=pytest.mark.full),
        pytest.param("bert", "neuron", 4, True, False, marks=pytest.mark.full),
    ],
)
def test_adapters_live_as_in_stock_peft(
    tmp_path, family, device, tensor_parallel_size, patched_first, sequence_parallel
):
    arguments = str(tmp_path), family, patched_first, sequence_parallel
    check(run_ranks(life, tensor_parallel_size, *arguments, device=device, environment=FLOAT64))


def faulty(rank, world_size, fault):
    owner, name, replacement = FAULTS[fault]
    stock = getattr(owner, name)
    mine, theirs = pair(*FAMILIES["llama"], sequence_parallel=fault.startswith("run"))
    inputs = class_batch(theirs.get_base_model(), "causal")
    setattr(owner, name, replacement)
    try:
        with KeepFloat64():
            return max(train(mine.train(), theirs.train(), inputs, steps=2).values())
    finally:
        setattr(owner, name, stock)


FAULTS = {
    "gradients of whole factors are not summed": (FactorForward, "summed", lambda self, parameter: parameter),
    "partial sums stay partial": (RankGroup, "leave", lambda self, tensor: tensor),
    "runs see whole factors as if they were alone": (SequenceGroup, "parameter", lambda self, parameter: parameter),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_one_of_the_sums_shows(fault):
    for found in run_ranks(faulty, 2, fault, device="cpu", environment=FLOAT64):
        assert found > 1e-4


def several(rank, world_size):
    mine, theirs = pair(*FAMILIES["llama"])
    inputs = class_batch(theirs.get_base_model(), "causal")
    logits_error(mine, theirs, inputs)  # the first adapter is at work before the second one comes
    for model in (mine, theirs):
        torch.manual_seed(11)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False))
        model.add_weighted_adapter(["second", "second"], [0.5, 2.0], "third", combination_type="cat")
    found = []
    for adapter in ("second", "third", "default"):
        mine.set_adapter(adapter), theirs.set_adapter(adapter)
        assert [p.requires_grad for p in mine.parameters()] == [p.requires_grad for p in theirs.parameters()]
        found.append(logits_error(mine, theirs, inputs))
    twin = copy.deepcopy(mine)
    mine.delete_adapter("second"), theirs.delete_adapter("second")
    mine.set_adapter("third"), theirs.set_adapter("third")
    found.append(logits_error(mine, theirs, inputs))
    twin.set_adapter("third")
    found.append(logits_error(twin, theirs, inputs))
    with pytest.raises(PlanError, match="embed_tokens: adapter_names is not supported"):
        mine.eval()(**on_device(inputs), adapter_names=["default", "__base__", "third"])
    return found


def test_several_adapters_are_added_chosen_combined_copied_and_deleted():
    for found in run_ranks(several, 2, device="cpu", environment=FLOAT64):
        assert max(found) < EXACT, found


def unequal(rank, world_size):
    mine, _ = pair(*FAMILIES["llama"], seed=rank)
    first, _ = pair(*FAMILIES["llama"], seed=0)
    mine(input_ids=torch.tensor([[5, 6]], device=local_device()))
    return all(torch.equal(a, b) for a, b in zip(mine.parameters(), first.parameters(), strict=True))


def test_ranks_that_draw_different_adapters_go_on_with_those_of_the_first():
    assert all(run_ranks(unequal, 2, device="cpu", environment=FLOAT64))


def dropped(rank, world_size, sequence_parallel, attention_dropout):
    """What each adapter's dropout lets through, by the name of its layer."""
    config = dict(attention_dropout=attention_dropout)
    options = dict(target_modules=["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"], lora_dropout=0.5)
    mine, _ = pair("llama", "causal", options, config, sequence_parallel=sequence_parallel)
    masks = {}
    for name, module in mine.named_modules():
        if name.endswith("lora_dropout.default"):
            module.register_forward_hook(lambda module, args, output, name=name: masks.update({name: output != 0}))
    torch.manual_seed(1)
    mine.train()(input_ids=torch.arange(8, 24, device=local_device())[None])
    return {name.split(".")[-3]: mask.cpu() for name, mask in masks.items()}, torch.rand(3)


@pytest.mark.parametrize(
    "device, sequence_parallel, attention_dropout",
    [
        ("neuron", False, 0.5),
        ("cpu", True, 0.5),
        pytest.param("cpu", False, 0.0, marks=pytest.mark.full),
        pytest.param("neuron", True, 0.5, marks=pytest.mark.full),
    ],
)
def test_dropout_before_an_adapter_drops_the_same_where_its_input_is_the_same(
    device, sequence_parallel, attention_dropout
):
    arguments = sequence_parallel, attention_dropout
    (first, after), (second, after_too) = run_ranks(dropped, 2, *arguments, device=device, environment=FLOAT64)
    for name in ("q_proj", "gate_proj", "lm_head"):
        assert torch.equal(first[name], second[name]), name
    for name in ("o_proj", "down_proj"):
        assert not torch.equal(first[name], second[name]), name
    assert torch.equal(after, after_too)


def recomputed(rank, world_size, sequence_parallel):
    options = dict(target_modules=list(LLAMA), lora_dropout=0.5)
    mine, theirs = pair("llama", "causal", options, dict(attention_dropout=0.5), sequence_parallel=sequence_parallel)
    inputs = on_device(class_batch(theirs.get_base_model(), "causal"))
    gradients = []
    for recompute in (False, True):
        if recompute:
            mine.gradient_checkpointing_enable()
        mine.zero_grad()
        torch.manual_seed(1)
        mine.train()(**inputs).loss.backward()
        gradients.append([p.grad.clone() for p in mine.parameters() if p.requires_grad])
    return [error(b.cpu(), a.cpu()) for a, b in zip(*gradients, strict=True)]


@pytest.mark.parametrize(
    "device, sequence_parallel", [("neuron", False), pytest.param("cpu", True, marks=pytest.mark.full)]
)
def test_recomputed_adapters_drop_the_same(device, sequence_parallel):
    for found in run_ranks(recomputed, 2, sequence_parallel, device=device, environment=FLOAT64):
        assert max(found) < EXACT


def refusals(rank, world_size, directory):
    model = tiny_class("llama", "causal", torch.float32)
    patch_model(model, ParallelConfig(world_size))
    model.to(local_device())
    with pytest.raises(RuntimeError, match="size of tensor"):  # PEFT adds a shard and a whole product
        get_peft_model(copy.deepcopy(model), LoraConfig(use_dora=True, target_modules=["q_proj"]))
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(init_lora_weights="olora", target_modules=["q_proj"], r=2)
    )
    inputs = dict(input_ids=torch.tensor([[5, 6]], device=local_device()))
    with pytest.raises(PlanError, match="q_proj: the adapter 'default' has 64 inputs and 48 outputs .* and 96"):
        adapted(**inputs)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(PlanError, match="has adapters of PEFT.* merge_and_unload"):
        unpatch_model(model)
    with pytest.raises(PlanError, match="resize it before PEFT"):
        model.resize_token_embeddings(120)
    with pytest.raises(CheckpointError, match="save_pretrained of the PeftModel"):
        save_pretrained(model, directory)
    assert adapted.unload() is model
    unpatch_model(model)

    stock = tiny_class("llama", "causal", torch.float32)
    names = list(stock.state_dict())
    dora = get_peft_model(stock, LoraConfig(use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(PlanError, match="q_proj: .* DoraLinearVariant"):
        patch_model(stock, ParallelConfig(world_size))
    assert state_of(dora) is None
    dora(input_ids=torch.tensor([[5, 6]]))  # as it was
    assert list(dora.unload().state_dict()) == names


def test_what_cannot_be_right_is_refused_and_the_model_stays_as_it_was(tmp_path):
    run_ranks(refusals, 2, str(tmp_path), device="cpu")


@pytest.mark.full
def test_peft_is_not_needed_without_adapters():
    program = (
        "import sys; sys.modules['peft'] = None; import optimum_trn.trainer, optimum_trn.patching.adapters as a;"
        "from transformers import LlamaConfig, LlamaForCausalLM as L;"
        "m = L(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2));"
        "a.adopt_adapters(m); assert not a.has_adapters(m)\n"
        "with a.adapters_aside(m): pass"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
