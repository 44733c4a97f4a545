"""What the steps of this process would take on the hardware: recorded operations at the prices of the cost model.

Matrix products and attention are priced by their shapes; neighbours that are neither are fused as long as they have one
shape, so that a chain reads its first operands from HBM and writes its last result. Collectives are priced as groups of
neighbouring ranks and hide nothing. It is the same price list as the planner's, applied to what really ran.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from optimum_trn.cost import collectives
from optimum_trn.cost.calibration import TRAINIUM
from optimum_trn.cost.cores import MACHINES, Machine, Precision, get_machine
from optimum_trn.cost.operators import Chain, Demand, Matmul
from optimum_trn.device.record import Collective, Event, Operation, TensorType

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "float64": 8}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Price:
    """Seconds and floating point operations of a graph; `complete` unless something in it has no price."""

    seconds: float = 0.0
    flops: float = 0.0
    complete: bool = True

    def __add__(self, other: Price) -> Price:
        return Price(self.seconds + other.seconds, self.flops + other.flops, self.complete and other.complete)


def machine_of(instance: str, logical_core_size: int) -> Machine:
    """The machine of the cost model that a simulated instance is; one chip of trn2.48xlarge for trn2.3xlarge."""
    if instance == "trn2.3xlarge":
        whole = get_machine("trn2.48xlarge" if logical_core_size == 2 else "trn2.48xlarge-lnc1")
        return dataclasses.replace(whole, name=instance, num_chips=1, torus=(1, 1))
    name = f"{instance}-lnc{logical_core_size}"
    return get_machine(name if name in MACHINES else instance)


def price(events: Iterable[Event], machine: Machine) -> Price:
    """What one graph takes on a core of `machine`, its launch included."""
    demand, transfer, complete = Demand(), 0.0, True
    chain: list[Operation] = []

    def close_chain() -> Demand:
        priced = _chain(chain, machine)
        chain.clear()
        return priced

    for event in events:
        if isinstance(event, Collective):
            transfer += _collective(event, machine)
            continue
        if not isinstance(event, Operation):
            continue
        complete = complete and not event.name.startswith("neuron::")
        products = _products(event)
        if products or (chain and _shape(chain[-1]) != _shape(event)):
            demand += close_chain()
        if products:
            demand = sum((product.demand(machine.core, TRAINIUM) for product in products), demand)
        elif event.inputs:
            chain.append(event)
    demand += close_chain()
    seconds = demand.seconds(TRAINIUM.concurrency) + transfer + TRAINIUM.launch_seconds
    return Price(seconds, demand.flops, complete)


def precision_of(events: Iterable[Event]) -> Precision:
    """bfloat16 where any matrix product has it."""
    products = [event for event in events if isinstance(event, Operation) and _products(event)]
    narrow = any(tensor.dtype in ("bfloat16", "float16") for product in products for tensor in product.inputs)
    return "bf16_sr" if narrow else "fp32"


def _products(operation: Operation) -> list[Matmul]:
    """The matrix products of an operator, if it is made of them."""
    name = operation.name.removeprefix("aten::").partition(".")[0]
    tensors = operation.inputs
    if name in ("mm", "addmm", "bmm", "baddbmm", "matmul") and len(tensors) >= 2:
        left, right = tensors[-2:]
        batch = math.prod(left.shape[:-2])
        return [Matmul(left.shape[-2], left.shape[-1], right.shape[-1], _itemsize(left), batch=batch)]
    if operation.name == ATTENTION:
        query, key, value = tensors[:3]
        return _attention(query, key, value, 1)
    if operation.name == f"{ATTENTION}_backward":
        _, query, key, value = tensors[:4]
        return _attention(query, key, value, 2) + _attention(query, key, value, 1)[:1]
    if name == "convolution":
        image, weight = tensors[:2]
        positions = image.shape[0] * math.prod(image.shape[2:])  # an upper bound where the stride is above one
        return [Matmul(positions, math.prod(weight.shape[1:]), weight.shape[0], _itemsize(weight))]
    return []


def _attention(query: TensorType, key: TensorType, value: TensorType, times: int) -> list[Matmul]:
    """Scores and their product with the values; `times` as many products of each in a backward pass."""
    *batch, queries, width = query.shape
    keys, heads = key.shape[-2], math.prod(batch)
    scores = Matmul(queries, width, keys, _itemsize(query), batch=heads, in_memory=True)
    return [scores, Matmul(queries, keys, value.shape[-1], _itemsize(query), batch=heads, in_memory=True)] * times


def _chain(operations: list[Operation], machine: Machine) -> Demand:
    """Fused operators of one shape: everything that enters, and one result."""
    if not operations:
        return Demand()
    shape = _shape(operations[0])
    elements = math.prod(shape)
    itemsize = max(_itemsize(tensor) for tensor in operations[0].inputs)
    # Of every further operator, all operands but the largest, which is the result of the one before.
    sizes = [[_bytes(tensor) for tensor in operation.inputs] for operation in operations]
    traffic = sum(sizes[0]) + sum(sum(size) - max(size) for size in sizes[1:]) + elements * itemsize
    row = shape[-1] if shape else 1
    return Chain(elements, len(operations), traffic, row=max(row, 1)).demand(machine.core, TRAINIUM)


def _collective(collective: Collective, machine: Machine) -> float:
    size = sum(map(_bytes, collective.inputs))
    ranks = len(collective.ranks)
    if ranks < 2:
        return 0.0
    members = sorted(collective.ranks)
    group = collectives.group(machine, ranks, members[1] - members[0])
    match collective.name:
        case "all_reduce":
            return collectives.all_reduce(size, group, machine)
        case "all_gather":
            return collectives.all_gather(size * ranks, group, machine)
        case "reduce_scatter":
            return collectives.reduce_scatter(size, group, machine)
        case "all_to_all":
            return collectives.all_to_all(size, group, machine)
    return size / machine.link_bytes_per_second + machine.latency.launch


def _shape(operation: Operation) -> tuple[int, ...]:
    return max((tensor.shape for tensor in operation.inputs), key=math.prod, default=())


def _elements(tensor: TensorType) -> int:
    return math.prod(tensor.shape)


def _itemsize(tensor: TensorType) -> int:
    return ITEMSIZE.get(tensor.dtype, 4)


def _bytes(tensor: TensorType) -> int:
    return _elements(tensor) * _itemsize(tensor)
