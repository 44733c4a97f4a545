"""Ranks that hold other tokens of the same sequences train as one process does."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import optimum_trn.parallel.context
import optimum_trn.parallel.ring
from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.grad_norm import clip_grad_norm_
from optimum_trn.parallel.mesh import axis_of
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, kinds, tiny_class
from tests.models.parity import relative
from tests.models.tiny import KeepFloat64, batch, tiny_model

EXACT = 1e-9


def train(rank, world_size, model_type, degrees, overrides, kind="masked", steps=3):
    """The largest deviation of each step's loss, norm and gradients, and of the weights, from one process."""
    model = tiny_model(model_type, torch.float64, **overrides)
    stock = copy.deepcopy(model).train()
    config = ParallelConfig(**degrees)
    patch_model(model, config)
    model.to(local_device()).train()
    state = state_of(model)
    mesh = state.mesh
    copies, row = axis_of(mesh, "dp").size(), axis_of(mesh, "dp").get_local_rank()
    # Odd lengths, which twice the number of ranks does not divide, and other numbers of labels in each.
    batches = [batch(stock, rows=4, length=11 + 2 * index, seed=index) for index in range(2)]
    if kind != "masked":
        for rows in batches:
            del rows["attention_mask"]
            rows["input_ids"] = rows["input_ids"].clamp(min=3)
            if kind == "packed":
                rows["use_cache"] = torch.tensor(False)  # with a cache, the stock model takes a row for one sequence
                length = rows["input_ids"].shape[1]
                rows["position_ids"] = torch.cat([torch.arange(4), torch.arange(length - 4)]).expand(4, -1)
    runner = DistributedDataParallel(model, process_group=mesh.get_group("dp_cp"))
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(stock.parameters(), lr=1e-2, weight_decay=0.1)
    worst = dict(loss=0.0, norm=0.0, gradients=0.0, weights=0.0)
    with KeepFloat64():
        for _ in range(steps):
            mine.zero_grad()
            theirs.zero_grad()
            items = sum((rows["labels"][:, 1:] != -100).sum() for rows in batches)
            expected, actual = 0.0, torch.zeros((), dtype=torch.float64)
            for index, rows in enumerate(batches):
                loss = stock(**rows, num_items_in_batch=items).loss
                loss.backward()
                expected += loss.item()
                own = {
                    name: (tensor.chunk(copies)[row] if tensor.dim() else tensor).to(local_device())
                    for name, tensor in rows.items()
                }
                runner.require_backward_grad_sync = index + 1 == len(batches)
                loss = runner(**own, num_items_in_batch=items.to(local_device())).loss
                (loss * copies).backward()
                actual += loss.detach().cpu()
            dist.all_reduce(actual, group=mesh.get_group("dp"))
            expected_norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5).item()
            assert expected_norm > 0.5, "clipping is not active"
            norm = clip_grad_norm_(model.named_parameters(), state.placements, state.tp_group, 0.5).item()
            worst["loss"] = max(worst["loss"], abs(actual.item() - expected) / expected)
            worst["norm"] = max(worst["norm"], abs(norm - expected_norm) / expected_norm)
            for name, parameter in stock.named_parameters():
                whole = unshard_from_group(model.get_parameter(name).grad, state.placements[name], state.tp_group)
                worst["gradients"] = max(worst["gradients"], relative(whole, parameter.grad))
            mine.step()
            theirs.step()
    for name, parameter in stock.named_parameters():
        whole = unshard_from_group(model.get_parameter(name).detach(), state.placements[name], state.tp_group)
        worst["weights"] = max(worst["weights"], relative(whole, parameter))
    return worst


def prove(world_size, model_type, degrees, kind="masked", device="cpu", steps=3, **overrides):
    arguments = (model_type, degrees, overrides, kind, steps)
    for worst in run_ranks(train, world_size, *arguments, device=device, environment=FLOAT64):
        assert max(worst.values()) < EXACT, worst


@pytest.mark.parametrize("device, kind", [("cpu", "masked"), ("cpu", "packed"), ("neuron", "causal")])
def test_llama_trains_as_in_one_process(device, kind):
    """Accumulation of 2, clipping, odd lengths that the chunks do not divide, padding on both sides."""
    prove(2, "llama", dict(context_parallel_size=2), kind, device)


def test_composes_with_tensor_and_sequence_parallelism():
    prove(4, "qwen3", dict(context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True), steps=1)


EAGER = dict(experts_implementation="eager")  # the grouped kernels refuse float64


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size, model_type, degrees, kind, overrides",
    [
        (4, "llama", dict(context_parallel_size=2), "masked", {}),  # and two data-parallel ranks
        (4, "llama", dict(context_parallel_size=2, tensor_parallel_size=2), "packed", {}),
        (4, "gpt_oss", dict(context_parallel_size=4), "masked", dict(sliding_window=4, **EAGER)),
        (3, "mistral", dict(context_parallel_size=3), "causal", dict(sliding_window=3)),
        (2, "gemma2", dict(context_parallel_size=2), "causal", {}),  # caps its scores
        (
            4,
            "mixtral",
            dict(context_parallel_size=2, tensor_parallel_size=2),
            "masked",
            dict(output_router_logits=True, **EAGER),
        ),
    ],
)
def test_layouts_windows_sinks_caps_and_auxiliary_losses(world_size, model_type, degrees, kind, overrides):
    prove(world_size, model_type, degrees, kind, **overrides)


def hides_one_more(mask, queries, keys):
    return keys > queries or (queries, keys) == (3, 0)


def not_scaled(ctx, *grads):
    return grads[0], None


def planted(rank, world_size, error):
    owner, name, wrong = {
        "a pair of chunks": (optimum_trn.parallel.ring.RingMask, "hides", hides_one_more),
        "the scale of the loss": (optimum_trn.parallel.context._Total, "backward", staticmethod(not_scaled)),
    }[error]
    stock = owner.__dict__[name]
    setattr(owner, name, wrong)
    try:
        return train(rank, world_size, "llama", dict(context_parallel_size=2), {}, "masked", 1)
    finally:
        setattr(owner, name, stock)


@pytest.mark.parametrize("error", ["a pair of chunks", "the scale of the loss"])
def test_a_planted_error_shows(error):
    for worst in run_ranks(planted, 2, error, device="cpu", environment=FLOAT64):
        assert max(worst.values()) > 1e-3, worst


def survey(rank, world_size, model_type, kinds_of_type, degrees):
    """By kind of class, the largest deviation of one pass in training and one in evaluation; or why it is refused."""
    return {kind: compared(model_type, kind, degrees) for kind in kinds_of_type}


def compared(model_type, kind, degrees):
    model = tiny_class(model_type, kind)
    stock = copy.deepcopy(model)
    rows = class_batch(stock, kind)
    try:
        patch_model(model, ParallelConfig(**degrees))
    except PlanError as error:
        return str(error)
    model.to(local_device())
    state = state_of(model)
    here = {name: tensor.to(local_device()) for name, tensor in rows.items()}
    worst = 0.0
    with KeepFloat64():
        expected, actual = stock(**rows, output_hidden_states=True), model(**here, output_hidden_states=True)
        for name, value in ((name, value) for name, value in expected.items() if name != "cache"):
            for one, other in zip(flat(actual[name]), flat(value), strict=True):
                worst = max(worst, relative(one, other))
        expected, actual = loss_of(stock.train(), rows), loss_of(model.train(), here)
        expected.backward()
        actual.backward()
    worst = max(worst, relative(actual, expected))
    for name, parameter in stock.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            dist.all_reduce(grad, group=state.mesh.get_group("dp_cp"))
            grad = grad / axis_of(state.mesh, "dp_cp").size()
            whole = unshard_from_group(grad, state.placements[name], state.tp_group)
            worst = max(worst, relative(whole, parameter.grad))
    return worst


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [one for part in value or () for one in flat(part)]


def loss_of(model, rows):
    outputs = model(**rows)
    return outputs.loss if "loss" in outputs else outputs[0].square().sum()


def refusals(rank, world_size):
    config = ParallelConfig(context_parallel_size=world_size)
    for model_type, kind, reason in [
        ("opt", "causal", "counts positions from the padding"),
        ("bloom", "causal", "does not go through the attention interface"),
        ("t5", "seq2seq", "reads more than one sequence"),
    ]:
        model = tiny_class(model_type, kind, torch.float32)
        with pytest.raises(PlanError, match=reason):
            patch_model(model, config)
        assert state_of(model) is None

    model = tiny_model("llama", torch.float32)
    stock = copy.deepcopy(model)
    patch_model(model, config)
    ids = torch.arange(3, 14)[None]
    with pytest.raises(PlanError, match="masks of two dimensions"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 11, 11, dtype=torch.bool))
    expected = stock.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(twin(input_ids=ids).logits, stock(input_ids=ids).logits)
    unpatch_model(model)
    for mine, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(mine) is type(theirs) and "forward" not in mine.__dict__
    assert model.config._attn_implementation == stock.config._attn_implementation
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, stock(input_ids=ids, labels=ids).loss)


def test_refusals_generation_copies_and_the_way_back():
    run_ranks(refusals, 2, device="cpu")


DECODERS = (
    "llama mistral granite smollm3 gemma gemma3_text qwen2 qwen3 cohere stablelm starcoder2 phi phi3 gpt2 gpt_bigcode "
    "gptj gpt_neox olmo2 mixtral qwen3_moe olmoe gpt_oss deepseek_v3"
).split()
ENCODERS = "bert distilbert electra modernbert albert".split()
KINDS = ("base", "causal", "masked", "sequence", "token", "question")


def assert_every_class_is_the_same(model_type, device="cpu"):
    arguments = (model_type, [kind for kind in kinds(model_type) if kind in KINDS], dict(context_parallel_size=2))
    for results in run_ranks(survey, 2, *arguments, device=device, environment=FLOAT64):
        for kind, worst in results.items():
            refused = isinstance(worst, str) and model_type == "albert" and "pooler" in worst
            assert refused or worst < EXACT, (kind, worst)


def test_every_class_of_bert_computes_as_in_one_process():
    assert_every_class_is_the_same("bert", "neuron")


@pytest.mark.full
@pytest.mark.parametrize("model_type", [*DECODERS, *ENCODERS])
def test_every_class_of_every_family_computes_as_in_one_process(model_type):
    """Outputs in evaluation, hidden states included, and the loss and all gradients of whatever head there is."""
    assert_every_class_is_the_same(model_type)
