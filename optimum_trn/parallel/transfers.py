"""Transfers between pipeline stages: trees of tensors, whose shapes are announced once for each shape of a batch."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.schedules import Action

HEADER_BYTES = 4096  # of an announcement: one size, so that it can be received before anything is known


class Message(NamedTuple):
    """What a stage receives for a micro-batch: activations from the stage before, or gradients from the one after."""

    kind: Literal["activations", "gradients"]
    stage: int
    micro_batch: int


class TensorSpec(NamedTuple):
    """A tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def floating(tree: Any) -> list[Tensor]:
    """The tensors of a tree that may have gradients."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def specs_of(tree: Any) -> Any:
    """The tree with a `TensorSpec` in place of each tensor."""
    return tree_map_only(Tensor, lambda tensor: TensorSpec(tuple(tensor.shape), tensor.dtype), tree)


def sent_by(program: Sequence[Action], num_stages: int, num_ranks: int) -> dict[int, list[Message]]:
    """The messages that a rank sends while it runs `program`, in order, by the rank that receives them."""
    messages: dict[int, list[Message]] = {rank: [] for rank in range(num_ranks)}
    for kind, stage, micro_batch in program:
        if kind == "forward" and stage + 1 < num_stages:
            messages[(stage + 1) % num_ranks].append(Message("activations", stage + 1, micro_batch))
        elif kind in ("backward", "input gradient") and stage > 0:
            messages[(stage - 1) % num_ranks].append(Message("gradients", stage - 1, micro_batch))
    return messages


class Layouts:
    """What is known of the trees that come into each stage, by the key of the batch's shapes; lives as long as the
    pipeline."""

    def __init__(self) -> None:
        self.announced: dict[tuple[int, Hashable], Any] = {}
        self.known: dict[tuple[int, Hashable], Any] = {}


class Transfers:
    """The messages of one step between this rank and the others of its pipeline.

    Messages between two ranks arrive in the order in which they are sent, which is that of the sender's program: the
    only order that every backend keeps.  What is needed later but sent earlier is therefore received earlier.
    `keys[micro_batch]` is equal on all ranks, and says which micro-batches have activations of equal shapes.
    """

    def __init__(
        self,
        group: RankGroup,
        programs: Sequence[Sequence[Action]],
        num_stages: int,
        keys: Sequence[Hashable],
        layouts: Layouts,
        device: torch.device,
    ) -> None:
        self.group = group
        self.num_stages = num_stages
        self.keys = keys
        self.layouts = layouts
        self.device = device
        self._to_come = [deque(sent_by(program, num_stages, group.size)[group.rank]) for program in programs]
        self._arriving: dict[Message, tuple[Any, list[tuple[dist.Work | None, Tensor]]]] = {}
        self._sending: list[tuple[dist.Work | None, Tensor]] = []
        self._sent: dict[tuple[int, int], list[TensorSpec]] = {}

    def send_activations(self, stage: int, micro_batch: int, tree: Any) -> None:
        """Send what `stage` receives from this rank, which gets the gradients of what is floating in it."""
        to = stage % self.group.size
        key = stage, self.keys[micro_batch]
        if key not in self.layouts.announced:
            specs = self.layouts.announced[key] = specs_of(tree)
            self._send(_header(specs).to(self.device), to)
        for leaf in tree_flatten(tree)[0]:
            if isinstance(leaf, Tensor):
                self._send(leaf.detach(), to)
        self._sent[stage - 1, micro_batch] = specs_of(floating(tree))

    def receive_activations(self, stage: int, micro_batch: int) -> Any:
        """What the stage before has sent: a tree of new tensors."""
        specs, works = self._receive(Message("activations", stage, micro_batch), (stage - 1) % self.group.size)
        tensors = iter(_finished(works))
        leaves, structure = tree_flatten(specs, is_leaf=_is_spec)
        return tree_unflatten([next(tensors) if _is_spec(leaf) else leaf for leaf in leaves], structure)

    def send_gradients(self, stage: int, micro_batch: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what `stage` has sent to this rank."""
        for gradient in gradients:
            self._send(gradient, stage % self.group.size)

    def receive_gradients(self, stage: int, micro_batch: int) -> list[Tensor]:
        """The gradients of what is floating in the activations that `stage` of this rank has sent."""
        message = Message("gradients", stage, micro_batch)
        return _finished(self._receive(message, (stage + 1) % self.group.size)[1])

    def finish(self) -> None:
        """Wait until everything has left."""
        _finished(self._sending)
        self._sending.clear()

    def _send(self, tensor: Tensor, to: int) -> None:
        self._sending = [(work, sent) for work, sent in self._sending if work is not None and not work.is_completed()]
        tensor = tensor.contiguous()
        self._sending.append((dist.isend(tensor, group=self.group.process_group, group_dst=to), tensor))

    def _receive(self, wanted: Message, source: int) -> Any:
        to_come = self._to_come[source]
        while wanted not in self._arriving:
            message = to_come.popleft()
            if message.kind == "gradients":
                specs = self._sent.pop((message.stage, message.micro_batch))
            else:
                key = message.stage, self.keys[message.micro_batch]
                if key not in self.layouts.known:
                    header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
                    dist.recv(header, group=self.group.process_group, group_src=source)
                    self.layouts.known[key] = pickle.loads(header.cpu().numpy().tobytes())
                specs = self.layouts.known[key]
            works = []
            for spec in filter(_is_spec, tree_flatten(specs, is_leaf=_is_spec)[0]):
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                works.append((dist.irecv(tensor, group=self.group.process_group, group_src=source), tensor))
            self._arriving[message] = specs, works
        return self._arriving.pop(wanted)


def broadcast_tree(tree: Any, group: RankGroup, source: int, device: torch.device) -> Any:
    """The tree of rank `source` on all ranks of the group; a collective."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    text = pickle.dumps(specs_of(tree)) if group.rank == source else b""
    size.fill_(len(text))
    dist.broadcast(size, group=group.process_group, group_src=source)
    data = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(device)
    dist.broadcast(data, group=group.process_group, group_src=source)
    specs = pickle.loads(data.cpu().numpy().tobytes())
    own = iter([leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)])
    leaves, structure = tree_flatten(specs, is_leaf=_is_spec)
    for place, spec in enumerate(leaves):
        if _is_spec(spec):
            mine = group.rank == source
            leaves[place] = (
                next(own).detach().contiguous() if mine else torch.empty(spec.shape, dtype=spec.dtype, device=device)
            )
            dist.broadcast(leaves[place], group=group.process_group, group_src=source)
    return tree_unflatten(leaves, structure)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec)


def _header(specs: Any) -> Tensor:
    text = pickle.dumps(specs)
    if len(text) > HEADER_BYTES:
        raise PlanError(
            f"What one pipeline stage gives the next takes {len(text)} bytes to describe, more than {HEADER_BYTES}: "
            f"{specs}. Layers that return so many values are not cut into stages."
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _finished(works: Sequence[tuple[dist.Work | None, Tensor]]) -> list[Tensor]:
    for work, _ in works:
        if work is not None:
            work.wait()
    return [tensor for _, tensor in works]
