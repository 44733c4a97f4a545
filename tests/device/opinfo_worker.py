"""Runs a slice of PyTorch's operator database on the device and on the CPU, and writes one JSON line per operator.

`python -m tests.device.opinfo_worker <dtype> <first> <stop> <step>`; every line is flushed before the next operator
starts, so that a crash names its operator: the line {"op": ..., "started": true} without a result.
"""

import json
import sys
import warnings
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

import optimum_trn  # noqa: F401  (installs the device)
from optimum_trn.device.build import load_extension

manual_seed = torch.manual_seed
HOST_ARGUMENTS = {"tensor_split"}  # whose tensor argument must be on the CPU, says the documentation


def to_device(device: str, value: Any) -> Any:
    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            moved = x.detach().to(device) if device != "cpu" else x.detach().clone()
            return moved.requires_grad_(x.requires_grad)
        if isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu"):
            return torch.device(device)
        return x

    return pytree.tree_map(move, value)


def run(op: Any, sample: Any, device: str, seed: int, with_grad: bool) -> tuple[list[Any], list[Any]]:
    """Outputs and input gradients of one sample, as CPU tensors."""
    inputs, args, kwargs = to_device(device, (sample.input, sample.args, sample.kwargs))
    if op.name in HOST_ARGUMENTS:
        args = sample.args
    # The database seeds random operators itself; adding to every seed shows which operators draw at all.
    with mock.patch.object(torch, "manual_seed", lambda value: manual_seed(value + seed)):
        torch.manual_seed(0)
        outputs = op(inputs, *args, **kwargs)
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    wrong = [x.device for x in leaves if x.device.type != device]
    moved = [x for x in pytree.tree_leaves((inputs, args, kwargs)) if isinstance(x, (torch.Tensor, torch.device))]
    if wrong and moved:  # a factory that was given no device answers on the CPU
        raise AssertionError(f"output on {wrong[0]}")
    gradients: list[Any] = []
    if with_grad:
        roots = [x.abs().sum() if x.is_complex() else x.sum() for x in leaves if x.requires_grad]
        wanted = [
            x for x in pytree.tree_leaves((inputs, args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        if roots and wanted:
            gradients = list(torch.autograd.grad(roots, wanted, allow_unused=True))
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(outputs)], gradients


def same_bits(left: Any, right: Any) -> bool:
    """Whether two outputs are equal to the last bit, NaNs included."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and (left == right or left != left)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.cpu(), right.cpu()
    if left.is_sparse or left.layout != torch.strided:
        return right.layout == left.layout and same_bits(left.to_dense(), right.to_dense())
    return torch.equal(
        *(
            x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            for x in (left, right)
        )
    )


def check(op: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Counts of samples tried and passed, whether the operator is random, and the first failure's text."""
    torch.manual_seed(0)
    with_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    result: dict[str, Any] = {"op": op.name, "tried": 0, "passed": 0}
    random = False
    for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=with_grad)):
        try:
            expected = run(op, sample, "cpu", 0, with_grad)
            if not random and number < 12:
                again = run(op, sample, "cpu", 1, with_grad)
                random = not all(map(same_bits, sum(expected, []), sum(again, [])))
        except Exception:  # the sample does not run on the CPU either
            continue
        result["random"] = random
        result["tried"] += 1
        try:
            actual = run(op, sample, "neuron", 0, with_grad)
            if random:
                expected = run(op, sample, "neuron", 0, with_grad)
            ok = len(sum(actual, [])) == len(sum(expected, [])) and all(
                map(same_bits, sum(expected, []), sum(actual, []))
            )
            text = f"sample {number}: differs"
        except Exception as error:
            ok, text = (
                False,
                f"sample {number}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
        result["passed"] += ok
        if not ok and "failure" not in result:
            result["failure"] = text[:300]
    return result


def main() -> None:
    dtype, first, stop, step = getattr(torch, sys.argv[1]), *map(int, sys.argv[2:5])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_extension().allow_unsupported_types(True)
    from torch.testing._internal.common_methods_invocations import op_db

    operators = [op for op in op_db if dtype in op.dtypes]
    for index in range(first, min(stop, len(operators)), step):
        op = operators[index]
        print(json.dumps({"op": op.name, "index": index, "total": len(operators), "started": True}), flush=True)
        try:
            print(json.dumps({"index": index, **check(op, dtype)}), flush=True)
        except Exception as error:
            print(
                json.dumps({"index": index, "op": op.name, "tried": 0, "passed": 0, "generator": repr(error)[:200]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
