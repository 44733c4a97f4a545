"""Patching changes one instance and nothing else, says what it did, and can be taken back."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from optimum_trn.errors import MeshError, PlanError, UnsupportedModelError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import patch_model, register_plan, state_of, supported_models, unpatch_model
from optimum_trn.patching.blocks import Attention
from optimum_trn.patching.plan import ModelPlan
from tests.devices import FLOAT64, NEURON_FIRST, local_device
from tests.distributed import run_ranks
from tests.models.tiny import SIZES, KeepFloat64, batch, randomise, tiny_model

TWO = ParallelConfig(tensor_parallel_size=2)


def patched_and_stock(model_type="qwen3", dtype=torch.float64, **overrides):
    """A patched model on this rank's device, and the stock model that it was."""
    stock = tiny_model(model_type, dtype, **overrides)
    patched = copy.deepcopy(stock)
    patch_model(patched, TWO)
    return patched.to(local_device()), stock


def on_device(rows):
    return {name: tensor.to(local_device()) for name, tensor in rows.items()}


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)


# What patching leaves


def report(rank, world_size):
    patched, stock = patched_and_stock("qwen3")
    state = state_of(patched)
    assert patched.state_dict().keys() == stock.state_dict().keys()
    assert isinstance(patched, type(stock)) and type(patched) is type(stock)
    assert inspect.signature(patched.forward) == inspect.signature(stock.forward)
    local = {name: tuple(parameter.shape) for name, parameter in patched.named_parameters()}
    assert local == {name: state.placements[name].local_shape(rank) for name in local}
    held = sum(parameter.untyped_storage().nbytes() for parameter in patched.parameters())
    assert held == sum(parameter.nbytes for parameter in patched.parameters()), "full storage is still held"
    assert state.tp_rank == rank and state.dp_rank == 0
    return str(state.report)


def test_the_report_lists_what_was_swapped_and_what_every_rank_holds_whole():
    text = run_ranks(report, 2, device="cpu")[0]
    assert "qwen3, tensor parallel 2" in text
    assert "model.layers.*.self_attn.q_proj: ColumnWise" in text
    assert "model.layers.*.mlp.down_proj: RowWise" in text
    assert "model.layers.*.self_attn.q_norm: SummedGradients" in text
    assert "lm_head: VocabParallelHead" in text
    replicated = next(line for line in text.splitlines() if "replicated" in line)
    assert "model.norm" in replicated and "input_layernorm" in replicated
    assert "logits is None in training with labels" in text


def round_trip(rank, world_size, overrides):
    patched, stock = patched_and_stock("llama", **overrides)
    patched(**on_device(batch(stock))).loss.backward()
    unpatch_model(patched)
    assert state_of(patched) is None
    for (name, mine), (other, theirs) in zip(patched.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name == other and torch.equal(mine.cpu(), theirs), name
    for mine, theirs in zip(patched.modules(), stock.modules(), strict=True):
        assert type(mine) is type(theirs)
        assert mine.extra_repr() == theirs.extra_repr()
        assert not mine._forward_pre_hooks and "forward" not in mine.__dict__
    assert patched.loss_function is stock.loss_function
    assert patched.model.embed_tokens.weight.grad.shape == stock.model.embed_tokens.weight.shape
    tied = patched.lm_head.weight is patched.model.embed_tokens.weight
    assert tied == stock.config.tie_word_embeddings
    patched.zero_grad()
    patched.resize_token_embeddings(200)
    patch_model(patched, TWO)  # 200 is divisible too: the sizes are read off the model
    assert patched.lm_head.weight.shape[0] == 100


@pytest.mark.parametrize("overrides", [{}, dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)])
@pytest.mark.parametrize("device", NEURON_FIRST)
def test_unpatching_restores_the_stock_model_bit_by_bit(overrides, device):
    run_ranks(round_trip, 2, overrides, device=device, environment=FLOAT64)


def on_meta(rank, world_size):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=True))
    patch_model(model, TWO)
    real, _ = patched_and_stock("qwen3", tie_word_embeddings=True)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert state_of(model).placements == state_of(real).placements
    assert model.lm_head.weight is model.model.embed_tokens.weight
    unpatch_model(model)
    assert model.lm_head.weight.shape == (104, 40)


def test_a_model_on_the_meta_device_gets_local_shapes():
    run_ranks(on_meta, 2, device="cpu")


def copies(rank, world_size):
    patched, stock = patched_and_stock("qwen3")
    rows = on_device(batch(stock))
    expected = patched.train()(**rows).loss
    for twin in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert state_of(twin).placements == state_of(patched).placements
        loss = twin(**rows).loss
        loss.backward()
        assert torch.equal(loss, expected)
        assert all(parameter.grad is None for parameter in patched.parameters())
        unpatch_model(twin)
    assert state_of(patched) is not None
    assert torch.equal(patched(**rows).loss, expected)


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_a_patched_model_can_be_copied_and_pickled(device):
    run_ranks(copies, 2, device=device, environment=FLOAT64)


# What the patched model computes


def evaluation(rank, world_size):
    patched, stock = patched_and_stock("qwen3", torch.float32, attn_implementation="eager")
    rows = batch(stock)
    options = dict(output_hidden_states=True, output_attentions=True)
    mine, theirs = patched(**on_device(rows), **options), stock(**rows, **options)
    for name in ("loss", "logits"):
        close(mine[name], theirs[name], 1e-5)
    assert len(mine.hidden_states) == len(theirs.hidden_states) > 0
    for actual, expected in zip(
        mine.hidden_states + mine.attentions, theirs.hidden_states + theirs.attentions, strict=True
    ):
        close(actual, expected, 1e-5)
    pair = patched(**on_device(rows), return_dict=False)
    close(pair[1], theirs.logits, 1e-5)
    assert len(pair) == len(stock(**rows, return_dict=False))


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_evaluation_gives_whole_logits_hidden_states_and_attentions(device):
    run_ranks(evaluation, 2, device=device, environment=FLOAT64)


def own_loss(rank, world_size):
    patched, stock = patched_and_stock("llama")
    rows = batch(stock)
    labels = rows.pop("labels")
    for model, inputs in ((patched.train(), on_device(rows)), (stock.train(), rows)):
        logits = model(**inputs).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten().to(logits.device), label_smoothing=0.1
        ).backward()
    state = state_of(patched)
    with KeepFloat64():
        for name, parameter in stock.named_parameters():
            grad = patched.get_parameter(name).grad
            close(unshard_from_group(grad, state.placements[name], state.tp_group), parameter.grad, 1e-5)


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_a_loss_of_ones_own_sees_whole_logits_in_training_and_gives_right_gradients(device):
    run_ranks(own_loss, 2, device=device, environment=FLOAT64)


def logits_in_training(rank, world_size):
    patched, stock = patched_and_stock("llama", torch.float32)
    rows = on_device(batch(stock))
    assert patched.eval()(**rows).logits.shape[-1] == 104
    assert patched.train()(**rows).logits is None
    positional = patched(rows["input_ids"], rows["attention_mask"], None, None, None, rows["labels"])
    assert positional.logits is None
    assert patched(**{**rows, "labels": None}).logits.shape[-1] == 104
    with pytest.raises(TypeError):
        patched(**rows, no_such_argument=object(), output_hidden_states=object, cache=3)
    assert patched.lm_head.gathers_output
    patched.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.shape[-1] - vocab_size
    outputs = patched(**rows)
    assert outputs.loss == 0 and outputs.logits.shape[-1] == 104


def test_logits_stay_local_only_where_our_loss_consumes_them():
    run_ranks(logits_in_training, 2, device="cpu")


def generation(rank, world_size, options):
    patched, stock = patched_and_stock("qwen3", torch.float32)
    rows = batch(stock)
    prompt = {name: rows[name][:2, :6] for name in ("input_ids", "attention_mask")}
    prompt["attention_mask"][1, -2:] = 1
    expected = stock.generate(**prompt, max_new_tokens=8, **options)
    assert torch.equal(patched.generate(**on_device(prompt), max_new_tokens=8, **options).cpu(), expected)


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=False),
        dict(do_sample=False, num_beams=3),
        dict(do_sample=False, use_cache=False),
        dict(do_sample=False, cache_implementation="static", disable_compile=True),
    ],
    ids=["greedy", "beam", "no cache", "static cache"],
)
@pytest.mark.parametrize("device", NEURON_FIRST)
def test_generation_gives_the_same_tokens(options, device):
    run_ranks(generation, 2, options, device=device)


def classification(rank, world_size):
    config = AutoConfig.for_model("qwen2", **SIZES, num_labels=3)
    stock = AutoModelForSequenceClassification.from_config(config)
    randomise(stock, 0)
    patched = copy.deepcopy(stock)
    text = str(patch_model(patched, TWO))
    assert "score" in text and "lm_head" not in text
    patched.to(local_device())
    rows = {**batch(stock), "labels": torch.tensor([0, 1, 2, 1])}
    mine, theirs = patched(**on_device(rows)), stock(**rows)
    close(mine.loss, theirs.loss, 1e-5)
    close(mine.logits, theirs.logits, 1e-5)
    mine.loss.backward()
    theirs.loss.backward()
    close(patched.model.norm.weight.grad, stock.model.norm.weight.grad, 1e-4)


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_the_same_plan_serves_a_classifier(device):
    run_ranks(classification, 2, device=device)


# What is refused


def refusals(rank, world_size):
    patched, stock = patched_and_stock("llama", torch.float32)
    with pytest.raises(PlanError, match="patched already"):
        patch_model(patched, TWO)
    with pytest.raises(PlanError, match="is not patched"):
        unpatch_model(stock)
    with pytest.raises(PlanError, match="shards of this rank"):
        patched.save_pretrained("/nowhere")
    with pytest.raises(MeshError, match="tensor_parallel_size 3 does not divide the world size 2"):
        patch_model(stock, ParallelConfig(tensor_parallel_size=3))
    with pytest.raises(MeshError, match="the mesh has 2"):
        patch_model(stock, ParallelConfig(), mesh=TWO.build_mesh())
    small = tiny_model("llama", torch.float32, num_attention_heads=1, num_key_value_heads=1, intermediate_size=1)
    before = copy.deepcopy(small.state_dict())
    with pytest.raises(PlanError) as error:
        patch_model(small, TWO)
    for part in ("num_attention_heads 1", "intermediate_size 1", "tensor_parallel_size up to 1"):
        assert part in str(error.value)
    assert "\n" not in str(error.value) and "vocab_size" not in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in small.state_dict().items())
    with pytest.raises(UnsupportedModelError, match="mamba: none of its modules is recognised"):
        config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=64)
        patch_model(AutoModelForCausalLM.from_config(config), TWO)


def test_what_cannot_be_patched_is_refused_in_one_paragraph_that_names_the_numbers():
    run_ranks(refusals, 2, device="cpu")


def misfits(rank, world_size):
    model = tiny_model("llama", torch.float32)

    class Adapted(nn.Linear):
        pass

    model.model.layers[1].self_attn.k_proj.__class__ = Adapted
    with pytest.raises(PlanError, match="layers.1.self_attn.k_proj: ColumnWise is for Linear, not for Adapted"):
        patch_model(model, TWO)
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(PlanError, match="'model.layers.1.mlp.up_proj', which LlamaForCausalLM does not have"):
        patch_model(model, TWO)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (64, 40)

    tied = tiny_model("llama", torch.float32)
    tied.model.layers[0].stranger = nn.Linear(40, 104, bias=False)
    tied.model.layers[0].stranger.weight = tied.model.embed_tokens.weight
    with pytest.raises(PlanError, match="stranger.weight .* are one tied parameter"):
        patch_model(tied, TWO)

    unknown = tiny_model("llama", torch.float32)
    unknown.model.layers[1].self_attn.gate = nn.Linear(40, 8)
    with pytest.raises(PlanError, match="self_attn: its parameter 'gate.weight' .* does not say what it is for"):
        patch_model(unknown, TWO)


def test_a_module_that_the_plan_does_not_fit_is_named():
    run_ranks(misfits, 2, device="cpu")


def test_one_process_keeps_the_stock_model():
    model = tiny_model("llama", torch.float32)
    text = str(patch_model(model, ParallelConfig()))
    assert "tensor parallel 1" in text
    assert state_of(model).tp_group is None and state_of(model).tp_rank == 0
    assert "forward" not in model.__dict__
    unpatch_model(model)
    assert state_of(model) is None
    with pytest.raises(MeshError, match="does not divide the world size 1"):
        patch_model(model, TWO)


def test_a_family_is_registered_once():
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(supported_models())
    projections = Attention(q="q", k="k", v="v", o="o")
    with pytest.raises(PlanError, match="registered already"):
        register_plan(ModelPlan("llama", attention=projections, mlp=projections))


def scaled_embeddings(rank, world_size):
    model = tiny_model("gemma3_text", torch.float32)
    patch_model(model, ParallelConfig(world_size))
    model.to(local_device())
    rows = {name: tensor.to(local_device()) for name, tensor in batch(model).items()}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**rows).loss, model(**rows).loss)
        assert type(twin.model.embed_tokens).__name__ == type(model.model.embed_tokens).__name__
        unpatch_model(twin)
        assert type(twin.model.embed_tokens).__name__ == "Gemma3TextScaledWordEmbedding"


def test_a_model_with_an_embedding_class_of_its_own_is_copied_and_pickled():
    run_ranks(scaled_embeddings, 2, device="cpu")
