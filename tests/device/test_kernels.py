"""Operators run the CPU's kernels over aliases: no copies, the same bits, and the semantics of PyTorch's tensors."""

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import optimum_trn  # noqa: F401
from optimum_trn.device.build import load_extension

extension = load_extension()


@pytest.fixture
def float64():
    extension.allow_unsupported_types(True)
    yield
    extension.allow_unsupported_types(False)


def both(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(*shape, dtype=dtype)
    return x, x.to("neuron")


# ---------------------------------------------------------------------------------------------------------- aliasing


def test_an_alias_shares_memory_and_keeps_it_alive():
    x = torch.arange(6.0, device="neuron")
    alias = extension.to_cpu(x)
    assert alias.device.type == "cpu" and alias.data_ptr() == x.data_ptr()
    alias += 1
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    del x
    gc.collect()
    junk = [torch.zeros(6, device="neuron") for _ in range(50)]
    assert alias.tolist() == [1, 2, 3, 4, 5, 6] and len(junk) == 50


def test_views_share_memory_and_keep_the_base_alive():
    x = torch.zeros(4, 6, device="neuron")
    view = x.t()[1:4].unfold(1, 2, 1).diagonal()
    view.fill_(3)
    assert x.sum().item() == 3.0 * view.unique().numel() * x.eq(3).sum().item()
    flat = x.view(-1)
    del x
    gc.collect()
    torch.full((24,), 9.0, device="neuron")
    assert set(flat.tolist()) == {0.0, 3.0}
    assert flat.chunk(3)[0]._base is flat._base or flat._is_view()


def test_in_place_and_out_return_the_very_tensor():
    x, y = torch.ones(3, device="neuron"), torch.empty(0, device="neuron")
    assert x.add_(1) is x and torch.add(x, 1, out=y) is y
    assert y.tolist() == [3, 3, 3]
    values, indices = torch.empty(0, device="neuron"), torch.empty(0, dtype=torch.long, device="neuron")
    result = torch.sort(torch.tensor([3.0, 1.0, 2.0], device="neuron"), out=(values, indices))
    assert result[0].data_ptr() == values.data_ptr() and values.tolist() == [1, 2, 3] and indices.tolist() == [1, 2, 0]


def test_a_resized_output_is_seen_through_every_view_of_its_storage():
    x = torch.ones(2, device="neuron")
    other = x.view(2)
    x.resize_(5000).fill_(2)
    assert other.data_ptr() == x.data_ptr() and other.tolist() == [2, 2]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(5000 * 4)
    x.fill_(4)
    assert other.tolist() == [4, 4] and x.sum().item() == 20000


def test_out_of_the_wrong_size_grows():
    out = torch.empty(2, device="neuron")
    with pytest.warns(UserWarning, match="was resized"):
        torch.mul(torch.ones(100, device="neuron"), 3, out=out)
    assert out.shape == (100,) and out.sum().item() == 300


def test_lists_and_optional_lists():
    parts = [torch.full((2,), float(i), device="neuron") for i in range(3)]
    assert torch.cat(parts).tolist() == [0, 0, 1, 1, 2, 2] and torch.stack(parts).shape == (3, 2)
    torch._foreach_add_(parts, 1)
    assert [p.tolist() for p in parts] == [[1, 1], [2, 2], [3, 3]]
    x, y = both(4, 5, 6)
    index = torch.tensor([2, 0])
    assert torch.equal(x[:, index, None, [1, 3]], y[:, index.to("neuron"), None, [1, 3]].cpu())
    y[:, index] = 7.0
    x[:, index] = 7.0
    assert torch.equal(x, y.cpu())
    assert torch.equal(x[x > 0], y[y > 0].cpu())


def test_conjugate_and_negative_views():
    x = torch.randn(4, 4, dtype=torch.complex64)
    y = x.to("neuron")
    assert (
        y.conj().is_conj()
        and torch.equal(y.conj().cpu(), x.conj())
        and torch.equal((y.conj() @ y.mH).cpu(), x.conj() @ x.mH)
    )
    assert y.conj().imag.is_neg() and torch.equal(y.conj().imag.cpu(), x.conj().imag)
    assert torch.equal(torch.view_as_real(y).cpu(), torch.view_as_real(x))
    target = torch.empty(4, 4, dtype=torch.complex64, device="neuron")
    target.copy_(x.conj())
    assert torch.equal(target.cpu(), x.conj().resolve_conj())
    z = torch.zeros(4, 4, dtype=torch.complex64)
    z.conj().copy_(y)
    assert torch.equal(z, x.conj().resolve_conj())


def test_set_and_storages():
    x = torch.arange(6.0, device="neuron")
    y = torch.empty(0, device="neuron").set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    assert y.tolist() == [[2, 3], [4, 5]]
    y.zero_()
    assert x.tolist() == [0, 1, 0, 0, 0, 0]
    assert torch.empty(0, device="neuron").set_(x).data_ptr() == x.data_ptr()
    assert x.set_().numel() == 0


def test_data_assignment_and_version_counters():
    x = torch.ones(3, device="neuron")
    version = x._version
    x.mul_(2)
    assert x._version == version + 1
    y = torch.ones(3, device="neuron", requires_grad=True)
    z = (y * 2).exp()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.add_(1).sum().backward()
    y.data = torch.zeros(4, device="neuron")
    assert y.shape == (4,)


def test_no_copies_between_operators():
    x = torch.randn(1000, 1000, device="neuron")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        y = (x.t() @ x).relu_().view(-1)[::2]
    names = {event.key for event in seen.key_averages()}
    assert not names & {"aten::copy_", "aten::clone", "aten::_to_copy", "aten::_copy_from"}, names
    assert y.numel() == 500_000


# ------------------------------------------------------------------------------------------- devices, types, transfers


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.uint16, torch.uint32, torch.uint64])
def test_types_that_the_hardware_lacks_are_refused(dtype):
    ways = [
        lambda: torch.empty(3, dtype=dtype, device="neuron"),
        lambda: torch.zeros(3, dtype=dtype).to("neuron"),
        lambda: torch.zeros(3, device="neuron").to(dtype),
        lambda: torch.empty_strided((2,), (1,), dtype=dtype, device="neuron"),
        lambda: torch.ones(8, dtype=torch.uint8, device="neuron").view(dtype),
    ]
    for way in ways:
        with pytest.raises(TypeError, match="NeuronCores have no"):
            way()


def test_the_switch_allows_float64(float64):
    assert torch.ones(3, dtype=torch.float64, device="neuron").sum().item() == 3


def test_tensors_print():
    text = repr(torch.tensor([1.5, 2.0], device="neuron"))
    assert "1.5" in text and "neuron:0" in text


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64],
)
def test_transfers_round_trip(dtype):
    x = (torch.randn(5, 7, dtype=torch.complex64) if dtype.is_complex else torch.randint(0, 2, (5, 7))).to(dtype)
    y = x.to("neuron")
    assert (
        y.dtype == dtype
        and torch.equal(y.cpu(), x)
        and torch.equal(y.t().cpu(), x.t())
        and torch.equal(y.to("neuron:1").cpu(), x)
    )
    assert torch.equal(x[::2, 1:].to("neuron").cpu(), x[::2, 1:])


def test_devices_do_not_mix():
    x = torch.ones(3, device="neuron")
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3, 3) @ x,
        lambda: torch.cat([x, torch.ones(3)]),
        lambda: x + x.to("neuron:1"),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()
    assert (x + torch.tensor(2.0)).sum().item() == 9  # a CPU scalar may
    with pytest.raises(RuntimeError, match="Expected all tensors|Expected condition"):
        F.linear(x[None], torch.ones(2, 3))


def test_sparse_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="dense tensors only|backend"):
        torch.eye(3, device="neuron").to_sparse()


def test_save_load_and_deepcopy():
    x = torch.randn(3, 4, device="neuron")
    buffer = io.BytesIO()
    torch.save({"x": x, "view": x[1]}, buffer)
    for location, device in ((None, "neuron:0"), ("cpu", "cpu"), ("neuron:1", "neuron:1")):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=location)
        assert str(loaded["x"].device) == device and torch.equal(loaded["x"].cpu(), x.cpu())
        assert loaded["view"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    duplicate = copy.deepcopy(x)
    assert (
        duplicate.device == x.device and duplicate.data_ptr() != x.data_ptr() and torch.equal(duplicate.cpu(), x.cpu())
    )


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    held = torch.neuron.memory_allocated()
    with FakeTensorMode():
        model = nn.Linear(10_000, 10_000, device="neuron")
        y = model(torch.ones(2, 10_000, device="neuron"))
        y.sum().backward()
        assert y.device == torch.device("neuron:0") and model.weight.grad.device == y.device
    assert torch.neuron.memory_allocated() == held
    model = nn.Linear(3, 4, device="meta").to_empty(device="neuron")
    assert model.weight.device.type == "neuron"


# ----------------------------------------------------------------------------------------- convolutions and attention


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_forward_and_backward(dims, transposed, groups, bias):
    torch.manual_seed(0)
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    layer = kind(4, 6, 3, stride=2, padding=1, groups=groups, bias=bias)
    x = torch.randn(2, 4, *[7] * dims)
    results = []
    for device in ("cpu", "neuron"):
        module, leaf = copy.deepcopy(layer).to(device), x.to(device).detach().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        results.append([t.detach().cpu() for t in (y, leaf.grad, *(p.grad for p in module.parameters()))])
    assert len(results[0]) == 3 + bias and all(map(torch.equal, *results))


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "gqa", "bfloat16", "expanded mask"])
def test_attention_takes_the_fused_kernel_real_and_fake(case):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    query, key = torch.randn(2, 4, 16, 8, dtype=dtype), torch.randn(2, 2 if case == "gqa" else 4, 16, 8, dtype=dtype)
    mask = {
        "mask": torch.ones(16, 16, dtype=torch.bool).tril(),
        "expanded mask": torch.ones(2, 1, 16, 1, dtype=torch.bool).expand(2, 1, 16, 16),
    }.get(case)
    options = dict(is_causal=case == "causal", enable_gqa=case == "gqa")

    def attend(device: str) -> list[torch.Tensor]:
        q, k, v = (x.to(device).detach().requires_grad_() for x in (query, key, key))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.to(device), **options)
        y.float().square().sum().backward()
        return [y, q.grad, k.grad, v.grad]

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        on_device = attend("neuron")
    names = {event.key for event in seen.key_averages()}
    assert {ATTENTION, ATTENTION + "_backward"} <= names, names
    assert all(torch.equal(x.detach(), y.detach().cpu()) for x, y in zip(attend("cpu"), on_device, strict=True))

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            recorded.add(function._schema.name)
            return function(*args, **(kwargs or {}))

    recorded: set[str] = set()
    with FakeTensorMode() as mode, Recorder():
        q, k, v = (
            mode.from_tensor(x.to("meta")).to("neuron")
            if False
            else torch.empty(x.shape, dtype=dtype, device="neuron", requires_grad=True)
            for x in (query, key, key)
        )
        fake_mask = None if mask is None else torch.empty(16, 16, dtype=torch.bool, device="neuron")
        F.scaled_dot_product_attention(q, k, v, attn_mask=fake_mask, **options).sum().backward()
    assert {ATTENTION, ATTENTION + "_backward"} <= recorded, recorded


def test_attention_with_dropout_or_without_the_kernel_falls_back_to_math():
    q = torch.randn(2, 4, 16, 8, device="neuron")
    for run in (lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), lambda: math_only(q)):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run()
        assert ATTENTION not in {event.key for event in seen.key_averages()}


def math_only(q: torch.Tensor) -> torch.Tensor:
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


# -------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_modules(kind, bias, float64):
    torch.manual_seed(0)
    model = kind(5, 7, num_layers=2, bias=bias, bidirectional=True, batch_first=True).double()
    x = torch.randn(3, 4, 5).double()
    results = []
    for device in ("cpu", "neuron"):
        module, leaf = copy.deepcopy(model).to(device), x.to(device).detach().requires_grad_()
        y, _ = module(leaf)
        (y.square().sum() + y.sum()).backward()
        results.append([t.detach().cpu() for t in (y, leaf.grad, *(p.grad for p in module.parameters()))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["norms", "embedding", "transformer"])
def test_modules_give_the_same_bits(kind):
    torch.manual_seed(0)
    model = {
        "norms": lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.InstanceNorm2d(8),
            nn.Flatten(),
            nn.LayerNorm(8 * 36),
            nn.GELU(),
        ),
        "embedding": lambda: nn.Sequential(
            nn.Embedding(10, 8, padding_idx=0), nn.Flatten(), nn.Linear(32, 4), nn.LogSoftmax(-1)
        ),
        "transformer": lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
    }[kind]()
    x = {
        "norms": torch.randn(4, 3, 8, 8),
        "embedding": torch.randint(0, 10, (4, 4)),
        "transformer": torch.randn(2, 5, 16),
    }[kind]
    results = []
    for device in ("cpu", "neuron"):
        module = copy.deepcopy(model).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            y = module(x.to(device))
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([t.detach().cpu() for t in module.state_dict().values()])
    assert all(map(torch.equal, *results))


# ----------------------------------------------------------------------------------------------------- decompositions

COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
DECOMPOSED: dict[str, str] = {}  # operator: why the device takes PyTorch's decomposition although the CPU has a kernel


def test_no_operator_decomposes_where_the_cpu_has_a_kernel():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with_kernel = [name for name in torch._C._dispatch_get_all_op_names() if has(name, "CPU")]
    decomposed = {
        name for name in with_kernel if not has(name, "PrivateUse1") and any(has(name, key) for key in COMPOSITES)
    }
    assert len(with_kernel) > 1000
    assert decomposed == set(DECOMPOSED)


@pytest.mark.parametrize(
    "name", ["silu_backward", "native_layer_norm", "native_group_norm", "gelu", "addcmul", "mish_backward"]
)
def test_kernels_that_a_fallback_would_decompose_run_as_one_operator(name):
    x = torch.randn(2, 4, 6, device="neuron")
    call = {
        "silu_backward": lambda: torch.ops.aten.silu_backward(x, x),
        "native_layer_norm": lambda: torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5),
        "native_group_norm": lambda: torch.ops.aten.native_group_norm(x, None, None, 2, 4, 6, 2, 1e-5),
        "gelu": lambda: torch.ops.aten.gelu(x),
        "addcmul": lambda: torch.ops.aten.addcmul(x, x, x),
        "mish_backward": lambda: torch.ops.aten.mish_backward(x, x),
    }[name]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    extra = {event.key for event in seen.key_averages()} - {
        f"aten::{name}",
        "aten::empty",
        "aten::empty_like",
        "aten::resize_",
        "aten::view",
        "aten::empty_strided",
    }
    assert not {key for key in extra if key.startswith("aten::")}, extra
