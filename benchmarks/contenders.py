"""One rank of something that trains: it is built once, and does steps whenever the harness asks for them.

Started by alternating.py, never by hand. What is compared differs in nothing else: same model, weights, rows, optimizer
(fused AdamW) and number of rows in a step.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
from torch import nn

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A Llama and its batch."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    rows: int
    length: int

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
        )


@dataclass(frozen=True)
class Contender:
    """What trains `case`: a `kind` of KINDS, in `ranks` processes of `threads` threads, with `arguments` of its own."""

    kind: str
    case: Case
    ranks: int = 1
    threads: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    environment: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Contender:
        values = json.loads(text)
        return Contender(**{**values, "case": Case(**values["case"])})


class Gate:
    """The harness's end of a rank: how many steps it may do, and when it has done them."""

    def __init__(self) -> None:
        self.commands = sys.stdin
        self.replies = os.fdopen(int(os.environ["HARNESS_REPLIES"]), "w")
        self.left = 0
        self.began = 0.0
        self.facts: dict[str, Any] = {}

    def enter(self) -> bool:
        """Before a step: waits until one is asked for; False at the end."""
        if self.left == 0:
            command = self.commands.readline().strip()
            if not command.isdecimal():
                return False
            self.left, self.began = int(command), time.perf_counter()
        self.left -= 1
        return True

    def leave(self, loss: Callable[[], float]) -> None:
        """After a step, whose `loss` is asked for when all of them are done."""
        if self.left == 0:
            value = loss()
            seconds = time.perf_counter() - self.began
            self.facts.setdefault("first", value)
            print(json.dumps({"seconds": seconds, "loss": value, **self.facts}), file=self.replies, flush=True)


def model_of(contender: Contender) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(contender.case.config()).to(getattr(torch, contender.dtype))


def rows_of(case: Case) -> torch.Tensor:
    """The rows of every step: all of them see the same, so that losses can be compared."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, case.vocabulary, (case.rows, case.length), generator=generator)


def trainer(contender: Contender, gate: Gate, ours: bool) -> None:
    """transformers' Trainer on the CPU, or ours on the device."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Gated(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not gate.enter():
                os._exit(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.leave(lambda: observed[-1].item())

    if ours:
        from optimum_trn import NeuronTrainer as cls
        from optimum_trn import NeuronTrainingArguments as arguments_class
    else:
        cls, arguments_class = Trainer, TrainingArguments
    case = contender.case
    observed: list[torch.Tensor] = []
    ranks_with_rows = contender.ranks // contender.arguments.get("tensor_parallel_size", 1)
    arguments = arguments_class(
        output_dir=tempfile.gettempdir(),
        max_steps=1_000_000,
        per_device_train_batch_size=case.rows // ranks_with_rows,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({} if ours else {"use_cpu": True}),
        **contender.arguments,
    )

    class Observed(cls):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            observed[:] = [loss.detach()]
            if ours:
                gate.facts["peak"] = torch.accelerator.max_memory_allocated()
            return loss

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = [{"input_ids": row, "labels": row} for row in rows_of(case)] * 500
    run = Observed(
        model=model_of(contender),
        args=arguments,
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[Gated()],
    )
    if contender.arguments.get("torch_compile"):
        from torch._dynamo.utils import counters

        gate.facts["graphs"] = 0
        enter = gate.enter
        gate.enter = lambda: (gate.facts.update(graphs=counters["stats"]["unique_graphs"]), enter())[1]  # type: ignore[method-assign]
    run.train()


def stock(contender: Contender, gate: Gate) -> None:
    trainer(contender, gate, ours=False)


def ours(contender: Contender, gate: Gate) -> None:
    trainer(contender, gate, ours=True)


def _loop(contender: Contender, gate: Gate, model: nn.Module, device: str, rows: torch.Tensor) -> None:
    """A bare loop, without what a Trainer does besides; it clips gradients only where that costs one call."""
    from torch.distributed.tensor import DTensor

    batch = dict.fromkeys(("input_ids", "labels"), rows.to(device))
    # The fused step takes DTensors or plain tensors, not both.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": kind} for kind in kinds if kind], lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    model.train()
    while gate.enter():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            gate.facts["peak"] = torch.accelerator.max_memory_allocated()
        gate.leave(loss.item)


def native(contender: Contender, gate: Gate) -> None:
    """transformers' own tensor parallelism, which shards what it loads only; on the device with `device`."""
    from transformers import LlamaForCausalLM

    device = contender.arguments.get("device", "cpu")
    if device != "cpu":
        import optimum_trn  # noqa: F401  (installs the device)

        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else None)
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, 0)
    if dist.get_rank() == 0:
        model_of(contender).save_pretrained(directory[0])
    dist.barrier()
    # By the name of the device: transformers would choose an accelerator that it finds.
    mesh = dist.init_device_mesh(device, (contender.ranks,))
    model = LlamaForCausalLM.from_pretrained(directory[0], tp_plan="auto", device_mesh=mesh)
    _loop(contender, gate, model, device, rows_of(contender.case))


def fsdp2(contender: Contender, gate: Gate) -> None:
    """torch's `fully_shard` of each layer and of the rest, parameters whole between forward and backward, on gloo."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (contender.ranks,))
    model = model_of(contender)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    rows = rows_of(contender.case).chunk(contender.ranks)[dist.get_rank()]
    _loop(contender, gate, model, "cpu", rows)


def products(contender: Contender, gate: Gate) -> None:
    """Only the matrix products of a step on this rank's shard, forward and backward, without any communication."""
    case, ranks = contender.case, contender.ranks
    dtype = getattr(torch, contender.dtype)
    tokens, width = case.rows * case.length, case.hidden // case.heads
    heads, kv_heads = case.heads // ranks, case.kv_heads // ranks
    shapes = [  # of weights: outputs, inputs
        *[(width * heads, case.hidden), (width * kv_heads, case.hidden), (width * kv_heads, case.hidden)],
        (case.hidden, width * heads),
        *[(case.intermediate // ranks, case.hidden)] * 2,
        (case.hidden, case.intermediate // ranks),
    ]
    layers = [(torch.randn(tokens, i, dtype=dtype), torch.randn(o, i, dtype=dtype)) for o, i in shapes] * case.layers
    layers.append(
        (torch.randn(tokens, case.hidden, dtype=dtype), torch.randn(case.vocabulary // ranks, case.hidden, dtype=dtype))
    )
    query = torch.randn(case.rows * heads, case.length, width, dtype=dtype)
    scores = torch.randn(case.rows * heads, case.length, case.length, dtype=dtype)
    out = {
        shape: torch.empty(shape, dtype=dtype)
        for i, w in layers
        for shape in ((tokens, w.shape[0]), tuple(w.shape), tuple(i.shape))
    }

    def step() -> None:
        for inputs, weight in layers:
            grads = torch.mm(inputs, weight.t(), out=out[tokens, weight.shape[0]])
            torch.mm(grads, weight, out=out[tuple(inputs.shape)])
            torch.mm(grads.t(), inputs, out=out[tuple(weight.shape)])
        for _ in range(case.layers):
            for _ in range(2):  # scores of queries and keys, and what they weigh: three products each with backward
                query @ query.transpose(1, 2)
                scores @ query
                scores.transpose(1, 2) @ query

    while gate.enter():
        step()
        gate.leave(lambda: 0.0)


KINDS = {"stock": stock, "ours": ours, "native": native, "fsdp2": fsdp2, "products": products}


def main() -> None:
    contender = Contender.of(sys.argv[1])
    torch.set_num_threads(contender.threads)
    gate = Gate()
    gate.facts["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    KINDS[contender.kind](contender, gate)
    os._exit(0)  # peers may have left already


if __name__ == "__main__":
    main()
