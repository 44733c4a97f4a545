"""The search for a proven plan of one tiny model: part by part, then all together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from optimum_trn.errors import UnsupportedModelError
from optimum_trn.patching.blocks.region import Region
from optimum_trn.patching.candidates import candidates
from optimum_trn.patching.plan import ModelPlan, Stack, base_model_prefix
from optimum_trn.patching.proof import SEEN, Subject, Trial
from optimum_trn.patching.recognise import Part, Recogniser
from optimum_trn.patching.trace import traced

NO_EFFECT = "it has no effect on the output"
"""Why a part is not proven that the inputs do not reach."""


@dataclass
class Search:
    """Proves what it can of one model: `proven` parts with their regions, and why the others are not.

    `known` is a plan of another class of the same type, whose regions are likely to hold here, too.
    """

    subject: Subject
    known: ModelPlan | None = None
    proven: list[tuple[Part, Region]] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)

    def run(self) -> ModelPlan:
        """The plan of everything that is proven; `UnsupportedModelError` if that is nothing."""
        model = self.subject.model
        prefix = base_model_prefix(model)
        parts: dict[Any, list[Part]] = {}
        for part in Recogniser(model, traced(self.subject)).parts():
            if f"{part.stack}.".startswith(prefix):
                parts.setdefault(part.key, []).append(part)
            elif part.kind == "attention":
                self.unproven[str(part)] = "it lies outside of the base model"
        trace = traced(self.subject)
        for alike in parts.values():
            regions = itertools.chain(self._known(alike[0], prefix), candidates(alike, model, trace))
            region = self._prove(alike[0], regions, prefix)
            if region is not None:
                self.proven.append((alike[0], region))
        if not self.proven:
            raise UnsupportedModelError(self._nothing(parts))
        plan = self._whole(prefix)
        return plan

    def _known(self, part: Part, prefix: str) -> Iterator[Region]:
        """The regions of the known plan that cut this part."""
        for stack in () if self.known is None else self.known.stacks:
            for region in stack.roles:
                if isinstance(region, Region) and stack.layers == part.stack[len(prefix) :]:
                    if part.row in region.rows or (part.row is None and part.owner in region.sums):
                        yield region

    def _nothing(self, parts: dict[Any, list[Part]]) -> str:
        name = self.subject.model.config.model_type
        if not parts:
            return f"{name}: none of its modules is recognised as an attention, a feed-forward part or experts."
        reasons = "; ".join(f"{path}: {reason}" for path, reason in self.unproven.items())
        return f"{name}: none of the parts that are recognised can be proven to compute the same sharded. {reasons}"

    def plan(self, proven: list[tuple[Part, Region]], prefix: str, embedding: tuple[str, ...] = ()) -> ModelPlan:
        """A plan of these regions, by the stacks of layers."""
        stacks: dict[str, list[Region]] = {}
        for part, region in proven:
            stacks.setdefault(part.stack[len(prefix) :], []).append(region)
        return ModelPlan(
            self.subject.model.config.model_type,
            embedding=embedding,
            stacks=tuple(Stack(path, *regions) for path, regions in stacks.items()),
        )

    def _prove(self, part: Part, regions: Iterator[Region], prefix: str) -> Region | None:
        reasons: dict[str, None] = {}
        for region in regions:
            try:
                error = self._trial(part, region, prefix, gradients=False).output
                if error > self.subject.tolerance:
                    reasons[f"its output differs by {error:.0e}"] = None
                    continue
                control = self._trial(part, region, prefix, gradients=False, loses=True).output
                if control < SEEN * self.subject.tolerance:
                    reasons[NO_EFFECT] = None
                    break
                settled = self._settle(part, region, prefix)
                if not isinstance(settled, str):
                    return settled
                reasons[settled] = None
            except Exception as error:
                reasons[f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"] = None
        self.unproven[str(part)] = " | ".join(list(reasons)[:4]) or "no way to cut it fits its structure"
        return None

    def _trial(self, part: Part, region: Region, prefix: str, **how: Any) -> Trial:
        return self.subject.trial(self.plan([(part, region)], prefix), **how)

    def _settle(self, part: Part, region: Region, prefix: str) -> Region | str:
        """The region with the syncs that make every gradient right, or what is wrong."""
        modes: list[Literal["first", "all"] | None] = [None]
        if region.owner and not region.sums:
            modes = ["first", "all", None]
        if region.sees or region.enters:  # known from another class
            modes = list(dict.fromkeys((region.enters, *modes)))
        reason = ""
        for mode in modes:
            current = replace(region, enters=mode, sees=region.sees if mode == region.enters else ())
            for _ in range(4):
                trial = self._trial(part, current, prefix)
                wrong = trial.wrong(self.subject.tolerance)
                if not wrong:
                    return current
                adjusted = self._adjusted(part, current, trial)
                reason = f"the gradient of {next(iter(wrong))} differs by {next(iter(wrong.values())):.0e}"
                if adjusted == current:
                    break
                current = adjusted
        return reason

    def _adjusted(self, part: Part, region: Region, trial: Trial) -> Region:
        """The region with those gradients summed that are partial, and those not summed that need not be."""
        layers = re.compile(re.escape(part.stack).replace(r"\*", "[^.]+") + r"\.[^.]+\.(.+)")
        matches = [(layers.fullmatch(name), name in trial.partial) for name in (*trial.partial, *trial.summed_twice)]
        sees = dict.fromkeys(region.sees)
        for match, partial in matches:
            if match is None:
                continue
            if partial:
                sees[match[1]] = None
            else:
                sees.pop(match[1], None)
        return replace(region, sees=tuple(sees))

    def _whole(self, prefix: str) -> ModelPlan:
        """All proven regions together, with the vocabulary cut as well if that is proven, too."""
        embeddings = self._embeddings(prefix)
        reasons = []
        for embedding, head in ((embeddings, True), ((), True), ((), False)):
            plan = replace(self.plan(self.proven, prefix, embedding), head=head)
            try:
                trial = self.subject.trial(plan, head=head)
                if head and "labels" in self.subject.inputs:  # where only the loss sees the logits, cut
                    self.subject.trial(plan, gradients=False, head=head, train=True)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            wrong = trial.wrong(self.subject.tolerance)
            if trial.output <= self.subject.tolerance and not wrong:
                return self._with_limits(plan)
            first = next(iter(wrong.items()), ("output", trial.output))
            reasons.append(f"{first[0]} differs by {first[1]:.0e}")
        raise UnsupportedModelError(
            f"{self.subject.model.config.model_type}: its parts are proven one by one, but not together. {reasons[-1]}"
        )

    def _with_limits(self, plan: ModelPlan) -> ModelPlan:
        """Whether the plan also holds where the ranks do not divide the heads."""
        uneven = False
        try:
            trial = self.subject.trial(plan, num_ranks=3, head=plan.head)
            uneven = trial.output <= self.subject.tolerance and not trial.wrong(self.subject.tolerance)
        except Exception:
            pass
        stacks = plan.stacks
        if not uneven:
            stacks = tuple(
                Stack(
                    stack.layers, *(replace(role, even_only=True) for role in stack.roles if isinstance(role, Region))
                )
                for stack in stacks
            )
        return replace(plan, stacks=stacks, unproven=dict(self.unproven))

    def _embeddings(self, prefix: str) -> tuple[str, ...]:
        """The paths of the input embeddings within the base model, under all their names."""
        try:
            weight = self.subject.model.get_input_embeddings().weight
        except Exception:
            return ()
        return tuple(
            name[len(prefix) :]
            for name, module in self.subject.model.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Embedding) and module.weight is weight and name.startswith(prefix)
        )
