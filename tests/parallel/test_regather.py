"""Layers of a gathered sequence keep this rank's run until backward, and give the gradients that they gave before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from optimum_trn.parallel import regather
from optimum_trn.parallel.fused import fused_linear
from optimum_trn.parallel.sequence import SequenceGroup, SequenceLength
from tests.devices import DEVICES, FLOAT64, local_device
from tests.distributed import run_ranks

BATCH, LENGTH, WIDTH = 2, 7, 6  # 2 ranks do not divide the length


def plain(x, weights, biases):
    return [F.linear(x * 1, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def regathered(x, weights, biases):
    return [regather.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def fused(x, weights, biases):
    return fused_linear(x, [weights, biases], [weights, biases])


LAYERS = {"kept": plain, "gathered again": regathered, "fused and gathered again": fused}


def block(run, layers, group, weights, biases):
    return sum(output.tanh().sum(-1) for output in layers(group.enter(run), weights, biases))


def passes(rank, world_size, autocast, recompute):
    """By the way of the layers: what is kept of the input, the collectives of backward, and the gradients."""
    device = local_device()
    dtype = torch.float32 if autocast else torch.float64
    length = SequenceLength()
    length.value = LENGTH
    group = SequenceGroup(dist.group.WORLD, length)
    found = {}
    for name, layers in LAYERS.items():
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=dtype).to(device)
        weights = [nn.Parameter(torch.randn(n, WIDTH, generator=generator, dtype=dtype).to(device)) for n in (4, 3)]
        biases = [nn.Parameter(torch.randn(n, generator=generator, dtype=dtype).to(device)) for n in (4, 3)]
        run = group.own_run(whole).requires_grad_()
        kept, gathers = [], []

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        all_gather = dist.all_gather

        def count(*args, gathers=gathers, all_gather=all_gather, **kwargs):
            gathers.append(args[1].dtype)
            return all_gather(*args, **kwargs)

        length.value = LENGTH
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                arguments = (run, layers, group, weights, biases)
                output = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        if not recompute:
            length.value = 3  # another batch has come in between
        dist.all_gather = count
        try:
            output.sum().backward()
        finally:
            dist.all_gather = all_gather
        shapes = {(4, WIDTH), (3, WIDTH), (7, WIDTH)}  # of the weights, and of both together
        inputs = [tensor for tensor in kept if tensor.shape[-1] == WIDTH and tuple(tensor.shape) not in shapes]
        elements = max([tensor.numel() for tensor in inputs], default=0)
        grads = [run.grad, *(p.grad for p in (*weights, *biases))]
        found[name] = elements, gathers, [grad.cpu() for grad in grads]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_run_is_kept_and_gathered_once_for_all_layers_with_the_same_gradients(device, autocast):
    for found in run_ranks(passes, 2, autocast, False, device=device, environment=FLOAT64):
        kept, gathers, expected = found["kept"]
        assert kept == BATCH * LENGTH * WIDTH
        assert gathers == []
        for name in ("gathered again", "fused and gathered again"):
            kept, gathers, grads = found[name]
            assert kept == BATCH * 4 * WIDTH, name
            assert gathers == [torch.bfloat16 if autocast else torch.float64]
            for grad, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(grad, wanted, rtol=2e-2 if autocast else 1e-12, atol=2e-2 if autocast else 0)


def test_recomputation_keeps_no_run_of_a_block_that_it_computes_again():
    for found in run_ranks(passes, 2, False, True, device="cpu"):
        for name, (kept, _, grads) in found.items():
            assert kept <= BATCH * 4 * WIDTH, name  # the input of the block itself
            for grad, wanted in zip(grads, found["kept"][2], strict=True):
                torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0)
