"""One configuration of the coverage table: a training step at tensor parallel 2, two processes against one."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import tempfile
import traceback
from contextlib import nullcontext
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.parallel import ParallelConfig, grad_norm
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import infer_plan, patch_model, state_of
from optimum_trn.patching.proof import copied, objective, randomise, relative
from optimum_trn.patching.recognise import mixes_states
from optimum_trn.patching.registry import find_plan
from optimum_trn.patching.verify import KeepFloat64
from tests.models.zoo import zoo_inputs, zoo_model

RANKS = 2
SECONDS = 150
"""After which a configuration is given up."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-3}  # some casts to float32 remain in float64
FLOORS = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest gradient: what counts as zero
ATTENTION = re.compile(r"Attention|Attn(?!Mask)")
FEED_FORWARD = re.compile(
    r"MLP|Mlp|FeedForward|FFN|Experts?$|Intermediate|DenseReluDense|DenseActDense|DenseGatedActDense"
)
FEED_FORWARD_PATHS = re.compile(r"(^|\.)(fc1|fc2|linear1|linear2|lin1|lin2|ffn\w*|intermediate\.dense)(\.|$)")
WHOLE_BY_DESIGN = re.compile(r"router|gate$|gate\.|norm|embed|position|adapter|per_layer|lora", re.IGNORECASE)


def run_case(kind: str, model_type: str) -> dict[str, Any]:
    """The row of the table for one configuration; called in a process of its own, which becomes rank 0."""
    row: dict[str, Any] = {"kind": kind, "type": model_type}
    try:
        model = zoo_model(model_type, kind)
    except Exception as error:
        return {**row, "status": "not built", "reason": _said(error)}
    row["class"] = type(model).__name__
    row["native"] = native_plan(model)
    randomise(model)
    inputs = zoo_inputs(model, model_type, kind)
    try:
        case = Case(model, inputs, text_only=kind == "image_text")
    except Exception as error:
        return {**row, "status": "does not train", "reason": _said(error)}
    row["dtype"] = str(case.dtype).removeprefix("torch.")
    text = text_type(model)
    row["declared"] = find_plan(text) is not None
    try:
        if not row["declared"] and text == model.config.model_type:
            row["unproven"] = dict(infer_plan(copy.deepcopy(model), inputs=inputs).unproven)
        row |= case.on_two_ranks()
    except (UnsupportedModelError, PlanError) as error:
        return {**row, "status": "refused", "reason": _said(error)}
    return {**row, "status": _status(row)}


def _status(row: dict[str, Any]) -> str:
    if row["loss"] > row["tolerance"] or row["gradients"] > row["tolerance"] or row["norm"] > row["tolerance"]:
        return "WRONG"
    parts = [name for name in ("attention", "mlp") if row[name] and row[name]["whole"]]
    if parts:
        return f"proven, {' and '.join(parts)} replicated"
    if not row["attention"]:
        return "proven, no attention"
    return "proven" if row["mlp"] else "proven, no MLP"


class Case:
    """A stock model, its inputs, and the step of its unsharded self."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any], text_only: bool = False) -> None:
        self.model = model
        self.counts = of_text if text_only else lambda model, parts: parts
        try:
            self._settle(torch.float64, inputs)
        except Exception:  # kernels that know no float64
            self._settle(torch.float32, inputs)

    def _settle(self, dtype: torch.dtype, inputs: dict[str, Any]) -> None:
        self.dtype = dtype
        self.inputs = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        self.model.to(dtype)
        self.training = True
        with torch.no_grad():
            try:  # what draws random numbers in training cannot be compared there
                losses = [self.step(copy.deepcopy(self.model), False, seed)[0] for seed in range(4)]
                self.training = all(torch.equal(loss, losses[0]) for loss in losses)
            except Exception:
                self.training = False
            self.step(self.model, backward=False)  # some change their structure on the first call
        for module in self.model.modules():
            for name, value in vars(module).items():
                if "cache" in name and isinstance(value, dict):
                    value.clear()
        self.stock = copy.deepcopy(self.model)
        self.loss, _ = self.step(self.stock)
        if not self.loss.isfinite():
            raise ValueError("the loss is not finite")

    def step(self, model: PreTrainedModel, backward: bool = True, seed: int = 0) -> tuple[torch.Tensor, Any]:
        """The loss of one training step."""
        torch.manual_seed(seed)
        model.train(self.training)
        with KeepFloat64() if self.dtype == torch.float64 else nullcontext():
            outputs = model(**copied(self.inputs))
            loss = outputs.loss if hasattr(outputs, "loss") else None
            if loss is None:  # some classes compute none
                loss = objective(outputs) if torch.is_grad_enabled() else torch.zeros(())
            loss = loss.sum()
            if backward:
                loss.backward()
        return loss.detach(), outputs

    def on_two_ranks(self) -> dict[str, Any]:
        """Errors against the stock step, and what is sharded, as rank 0 sees it; the other rank is a fork of it."""
        with tempfile.TemporaryDirectory() as directory:
            child = os.fork()
            rank = 1 if child == 0 else 0
            if rank == 1:
                signal.alarm(SECONDS)  # alarms are not inherited, and nobody waits for it if rank 0 dies
            try:
                store = dist.FileStore(f"{directory}/store", RANKS)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
                )
                row = self._on_rank()
                dist.barrier()
            except BaseException:
                if rank == 1:
                    os._exit(1)
                raise
            if rank == 1:
                os._exit(0)
            os.waitpid(child, 0)
        return row

    def _on_rank(self) -> dict[str, Any]:
        model = copy.deepcopy(self.model)
        report = patch_model(model, ParallelConfig(RANKS))
        state = state_of(model)
        assert state is not None
        loss, _ = self.step(model)
        errors: dict[str, float] = {}
        grads = [parameter.grad for parameter in self.stock.parameters() if parameter.grad is not None]
        floor = max(grad.abs().max().item() for grad in grads) * FLOORS[self.dtype]
        for name, expected in self.stock.named_parameters():
            parameter = model.get_parameter(name)
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole = unshard_from_group(grad, state.placements[name], state.tp_group)
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            errors[name] = relative(whole, wanted, floor)
        norm = grad_norm(model.named_parameters(), state.placements, state.tp_group)
        worst = max(errors, key=errors.__getitem__)
        return {
            "loss": relative(loss, self.loss),
            "gradients": errors[worst],
            "worst": worst,
            "norm": relative(norm, torch.nn.utils.get_total_norm(grads)),
            "tolerance": TOLERANCES[self.dtype],
            "mode": "train" if self.training else "eval",
            "local": report.local_parameters / report.total_parameters,
            **{
                name: sharded(self.stock, self.counts(self.stock, parts), state.placements)
                for name, parts in weights_by_part(self.stock, trained=True).items()
            },
            **({"unproven": dict(report.unproven)} if report.unproven else {}),
        }


def text_type(model: PreTrainedModel) -> str:
    """The model type of the text tower of a composite model; that of the model itself if it has none."""
    name: str = model.config.get_text_config(decoder=True).model_type
    return name if any(type_of(model, path) == name for path, _ in model.named_modules()) else model.config.model_type


def type_of(model: PreTrainedModel, path: str) -> str:
    """The model type of the innermost transformers model that a module belongs to."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        owner = model.get_submodule(".".join(names[:end]))
        if isinstance(owner, PreTrainedModel):
            return str(owner.config.model_type)
    return str(model.config.model_type)


def of_text(model: PreTrainedModel, parts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Of the parts of an image-text model those of its text tower; the others may stay whole."""
    text = text_type(model)
    return {path: names for path, names in parts.items() if type_of(model, path) == text}


def weights_by_part(model: nn.Module, trained: bool = False) -> dict[str, dict[str, list[str]]]:
    """The weight matrices of attentions and of feed-forward parts, by module, judged by the names of classes.

    With `trained`, those that had an effect on the loss of the last step.
    """
    parts: dict[str, dict[str, list[str]]] = {"attention": {}, "mlp": {}}
    modules = dict(model.named_modules())

    def is_a(path: str, part: re.Pattern[str], more_than_it: str) -> bool:
        name = type(modules[path]).__name__
        return part.search(name) is not None and re.search(more_than_it, name) is None

    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or WHOLE_BY_DESIGN.search(".".join(name.split(".")[-3:])):
            continue
        if trained and (parameter.grad is None or not parameter.grad.any()):
            continue
        owners = [".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 1)]
        if any(mixes_states(modules[owner]) for owner in owners):
            continue
        attention = [owner for owner in owners if is_a(owner, ATTENTION, r"Model|Layer$|Block$|For[A-Z]")]
        if attention:
            parts["attention"].setdefault(attention[0], []).append(name)
            continue
        inner = [owner for owner in owners if is_a(owner, FEED_FORWARD, r"(Model|Layer|Block|Decoder|Encoder)$")]
        if re.search(r"classifier|head", name):
            continue
        if inner or FEED_FORWARD_PATHS.search(name):
            owner = inner[0] if inner else name.rpartition(".")[0].rpartition(".")[0]
            parts["mlp"].setdefault(owner, []).append(name)
    return parts


def sharded(model: nn.Module, parts: dict[str, list[str]], placements: Any) -> dict[str, Any] | None:
    """Local and total bytes of parts, and those parts of which nothing is sharded; None if there are no parts."""
    if not parts:
        return None
    local = total = 0
    whole = []
    for owner, names in parts.items():
        sizes = [model.get_parameter(name).numel() * model.get_parameter(name).element_size() for name in names]
        own = [
            size
            // torch.Size(placements[name].global_shape).numel()
            * torch.Size(placements[name].local_shape(0)).numel()
            for name, size in zip(names, sizes, strict=True)
        ]
        total, local = total + sum(sizes), local + sum(own)
        if sum(own) == sum(sizes):
            whole.append(owner)
    return {"local_bytes": local, "total_bytes": total, "whole": whole}


def native_plan(model: PreTrainedModel) -> str:
    """What transformers' own tensor-parallel plan of the class shards, judged on the same modules."""
    plan = {name: style for name, style in (getattr(model, "_tp_plan", None) or {}).items() if style != "replicate"}
    prefix = model.base_model_prefix
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    plan |= {f"{prefix}.{name}": style for name, style in base.items()} if prefix else dict(base)
    if not plan:
        return "none"
    patterns = [re.sub(r"\d+", "*", name) for name in plan]
    parts = weights_by_part(model)
    cuts = []
    for part in ("attention", "mlp"):
        names = [name for names in parts[part].values() for name in names]
        cut = [
            name
            for name in names
            if any(fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern) for pattern in patterns)
        ]
        if cut:
            cuts.append(part)
    return " and ".join(cuts) or "head only"


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "-v" in sys.argv:
        traceback.print_exc()
    return f"{type(error).__name__}: {text}"[:400]


def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent
