"""The engine of a job that survives losses: steps over unequal pipelines, and what is done when one fails."""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.elastic.assignment import Assignment, Planner, cut
from optimum_trn.elastic.exchange import exchange
from optimum_trn.elastic.groups import Groups, leave_groups
from optimum_trn.elastic.layers import Layers
from optimum_trn.elastic.membership import COMMITTED, Membership, Snapshot, Superseded
from optimum_trn.elastic.reconfigure import copies
from optimum_trn.elastic.seeded import SeededPipeline
from optimum_trn.parallel.pipeline import Pipeline
from optimum_trn.patching.pipelined import Batch, Compute

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

PATIENCE_SECONDS = 1.0
"""How long a rank that has seen an error waits for the controller to say who was lost, before it asks it to go on."""
ATTEMPTS = 5  # of one step with the same members: what fails so often without a loss is no loss
FIRST_STEP, LAST_ACTIVE = "first_step", "last_active"  # keys of the store


class Record(NamedTuple):
    """What every process knows of a committed step."""

    losses: list[float]
    norm: float


@dataclass(frozen=True)
class Phase:
    """Where a process is: before the step of that number, or at what is done after it with the whole model."""

    step: int
    whole: bool = False


class Engine:
    """Trains `layers` together with the other processes that the controller has started.

    `planner` is the same in all of them, and so are the batches that `step` is given.  Every step is committed by all
    or by none: when a process is lost, the survivors discard what is not committed, rebuild their groups in place, copy
    the layers that they lack from those that hold them, and compute the step again.
    """

    def __init__(
        self, membership: Membership, layers: Layers, planner: Planner, devices: int, seed: int, timeout: timedelta
    ) -> None:
        self.membership = membership
        self.layers = layers
        self.planner = planner
        self.devices = devices
        self.seed = seed
        self.timeout = timeout
        self.generation = 0
        self.rounds = 0  # how often groups were made in this generation
        self.groups: Groups | None = None
        self.pipeline: SeededPipeline | None = None
        self.fresh = True  # this process has not trained yet: what it holds is not what the others do
        self.ahead = Phase(0)  # where the others were when they took this process in
        self.norm = torch.zeros(())
        self.on_active: Callable[[int], None] = lambda rank: None

    # ---- What a training loop calls ----------------------------------------------------------------------------------

    def step(
        self, step: int, micro_batches: Sequence[Batch], compute_loss: Compute, samples: Sequence[Any] = ()
    ) -> Tensor:
        """The losses of the micro-batches of a step, after it is committed; summed gradients are in the parameters.

        A process that comes late is given the records of the steps that it has missed, without computing anything.
        """
        if self.fresh and (record := self._record(step)) is None:
            self.membership.announce()
            self._surviving(Phase(step), lambda: None)
        if self._is_behind(step):
            record = self._record(step)
            assert record is not None
        else:
            attempt = partial(self._attempt, step, micro_batches, compute_loss, samples)
            record = self._surviving(Phase(step), attempt)
        self.norm = torch.tensor(record.norm)
        return torch.tensor(record.losses, dtype=torch.float32, device=self.layers.device)

    def catching_up(self, step: int) -> bool:
        """Whether what is done after a step with the whole model is over, since this process was not there."""
        return self.fresh or self._is_behind(step) or (step == self.ahead.step and not self.ahead.whole)

    def gather(self, step: int) -> None:
        """Have the whole model and optimizer in this process, as after that many steps, and no process group."""
        self._surviving(Phase(step, True), partial(self._gather, step))
        self._leave()

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients of this process so that the norm of all is at most `max_norm`; the norm before."""
        scale = min(1.0, max_norm / (float(self.norm) + 1e-6))
        for group in self.layers.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and scale < 1.0:
                    parameter.grad.mul_(scale)
        return self.norm

    # ---- Surviving ---------------------------------------------------------------------------------------------------

    def _surviving(self, phase: Phase, work: Callable[[], Result]) -> Result:
        """What `work` gives, in whichever generation it is done; raises what fails although nobody was lost."""
        failures = 0
        while True:
            error: str | None = None
            try:
                if self.groups is None or self.membership.generation > self.generation:
                    self._leave()
                    self._join(phase)
                return work()
            except Superseded:
                pass
            except RuntimeError as failure:  # torch.distributed raises no narrower one
                failures += 1
                if failures >= ATTEMPTS:
                    raise
                error = str(failure).splitlines()[0]
                # The frames hold tensors on their way, and those the connections that others wait on.
                traceback.clear_frames(failure.__traceback__)
            self._leave()
            if error is not None and self._next_generation(error):
                failures = 0

    def _next_generation(self, error: str) -> bool:
        """Wait until there is one; whether it has other members."""
        members = self.membership.snapshot(self.generation).members
        logger.warning(f"Generation {self.generation} has failed: {error}")
        try:
            self.membership.wait(self.generation, lambda: False, PATIENCE_SECONDS)
        except TimeoutError:
            self.membership.ask_for_another(self.generation)
            try:
                self.membership.wait(self.generation, lambda: False)
            except Superseded:
                pass
        except Superseded:
            pass
        return self.membership.snapshot(self.membership.generation).members != members

    def _leave(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
        self.pipeline = self.groups = None
        self.layers.release()
        for group in self.layers.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        leave_groups()

    # ---- Joining a generation ----------------------------------------------------------------------------------------

    def _join(self, phase: Phase) -> None:
        """Agree with the members of the newest generation on who does what, and get what this process lacks for it."""
        membership = self.membership
        generation = membership.wait(math.inf, self._generation_with_this) if self.fresh else membership.generation
        self.rounds = self.rounds + 1 if generation == self.generation else 0
        self.generation = generation
        snapshot, name = membership.snapshot(generation), f"{generation}.{self.rounds}"
        names = [f"{m.member}.{local}" for m in snapshot.members for local in range(self.devices)]
        held = [] if self.fresh else sorted(self.layers.held)
        mine = {"held": held, "step": phase.step, "whole": phase.whole, "fresh": self.fresh}
        said = membership.gather(f"said/{name}", json.dumps(mine), names, generation)
        everyone = [json.loads(said[other]) for other in names]
        assignment = self._plan(name, snapshot, everyone)
        self.ahead = self._where_the_others_are(everyone, phase)
        rank = assignment.rank_of(membership.member, membership.local)
        holders = assignment.holders(self.layers.map.modules, self.planner.templates)
        self._connect(name, assignment, rank, holders)
        held_by = {place: other["held"] for place, other in enumerate(everyone)}
        if all(other["fresh"] for other in everyone):
            held_by[0] = list(self.layers.map.modules)  # as in data parallelism, all start from what rank 0 has
        needed: dict[int, list[str]] = {place: [] for place in range(len(names))}
        for path, ranks in holders.items():
            for place in ranks:
                needed[place].append(path)
        received = exchange(rank, copies(self.layers.bytes, held_by, needed), self.layers.state_of)
        self._all_ready(f"ready/{name}", assignment)
        self.layers.install(received, needed[rank])
        self.fresh = False
        self._cut(assignment, rank)
        self.on_active(rank)

    def _generation_with_this(self) -> int:
        """The newest generation, if this process is in it."""
        newest = self.membership.generation
        members = self.membership.snapshot(newest).members if newest else ()
        return newest if any(member.member == self.membership.member for member in members) else 0

    def _plan(self, name: str, snapshot: Snapshot, everyone: Sequence[Mapping[str, Any]]) -> Assignment:
        """What the first of the members makes of the last plan that was carried out; all others read it."""
        store, members = self.membership.store, tuple(member.member for member in snapshot.members)
        key = f"plan/{name}"
        if self.membership.member == members[0] and self.membership.local == 0:
            last = self.membership.peek(LAST_ACTIVE)
            trained = [other for other in everyone if not other["fresh"]]
            step = max(other["step"] for other in trained or everyone)
            if last is None:
                assignment = Assignment(self.planner.first(members), members, self.devices, step=step)
            else:
                pipelines, actions = self.planner.next(Assignment.from_json(last).pipelines, members)
                assignment = Assignment(pipelines, members, self.devices, actions, step)
            store.set(key, assignment.to_json())
        self.membership.wait(self.generation, lambda: store.check([key]))
        return Assignment.from_json(store.get(key))

    def _where_the_others_are(self, everyone: Sequence[Mapping[str, Any]], phase: Phase) -> Phase:
        if not self.fresh:
            return self.ahead
        trained = {Phase(other["step"], other["whole"]) for other in everyone if not other["fresh"]}
        return max(trained, key=lambda other: (other.step, other.whole), default=phase)

    def _connect(self, name: str, assignment: Assignment, rank: int, holders: Mapping[str, list[int]]) -> None:
        sharing: dict[str, list[int]] = {}
        for path in self.layers.map.modules:
            for parameter in self.layers.names([path]):
                sharing.setdefault(parameter, []).extend(holders[path])
        self.sharing = {parameter: list(dict.fromkeys(ranks)) for parameter, ranks in sharing.items()}
        store = dist.PrefixStore(f"groups/{name}", self.membership.store)  # type: ignore[attr-defined]
        self.groups = Groups(store, assignment, rank, self.sharing, self.timeout)

    def _cut(self, assignment: Assignment, rank: int) -> None:
        assert self.groups is not None
        place = assignment.pipeline_of(rank)
        template = self.planner.templates[len(assignment.pipelines[place])]
        staged = self.layers.cut(cut(self.layers.map, template), self.groups.pipeline)
        engine = Pipeline(self.groups.pipeline, "1f1b", self.layers.device)
        self.pipeline = SeededPipeline(self.layers.model, staged, engine, self.seed)
        # A parameter that is tied over stages counts where the first of them is.
        pipelines = {other: assignment.pipeline_of(other) for ranks in self.sharing.values() for other in ranks}
        self.counts = {
            name: next(other for other in ranks if pipelines[other] == place) == rank
            for name, ranks in self.sharing.items()
            if rank in ranks
        }

    # ---- Committing --------------------------------------------------------------------------------------------------

    def _all_ready(self, key: str, assignment: Assignment) -> None:
        """Everyone has what the generation needs: it is active."""
        store = self.membership.store
        size = len(assignment.members) * self.devices
        if store.add(key, 1) == size and self.membership.decide(f"{key}/decision", "active") == "active":
            store.set(LAST_ACTIVE, assignment.to_json())
            store.set(f"active/{self.generation}", assignment.to_json())
        self._agreed(f"{key}/decision", "active")

    def _agreed(self, key: str, outcome: str) -> None:
        """Wait for a decision; `Superseded` if it is another one, since somebody was lost before it could be taken."""
        try:
            self.membership.wait(self.generation, lambda: self.membership.store.check([key]))
        except Superseded:
            pass
        if self.membership.decide(key, "void") != outcome:
            raise Superseded

    def _commit(self, step: int, record: dict[str, Any]) -> None:
        """Have the step done by all or by none; whoever is last to have its gradients decides."""
        assert self.groups is not None
        store, key = self.membership.store, f"step/{self.generation}.{self.rounds}/{step}"
        first = int(self.membership.decide(FIRST_STEP, str(step)))
        if store.add(f"{key}/done", 1) == dist.get_world_size():
            store.set(f"record/{step - first}", json.dumps(record))
            self.membership.decide(key, "commit")
        self._agreed(key, "commit")
        store.set(COMMITTED, str(step - first + 1))

    def _record(self, step: int) -> Record | None:
        """Of a committed step; None if it is still to be done."""
        first = self.membership.peek(FIRST_STEP)
        if first is None or step - int(first) >= int(self.membership.store.get(COMMITTED)):
            return None
        found = json.loads(self.membership.store.get(f"record/{step - int(first)}"))
        return Record(found["losses"], found["norm"])

    def _is_behind(self, step: int) -> bool:
        return self.fresh or step < self.ahead.step

    # ---- The work ----------------------------------------------------------------------------------------------------

    def _attempt(
        self, step: int, micro_batches: Sequence[Batch], compute_loss: Compute, samples: Sequence[Any]
    ) -> Record:
        assert self.groups is not None and self.pipeline is not None
        assignment, rank = self.groups.assignment, self.groups.rank
        place = assignment.pipeline_of(rank)
        share = self.planner.shares(assignment.pipelines, len(micro_batches))[place]
        parameters = {name: self.layers.parameter(name) for name in self.counts}
        for parameter in parameters.values():
            parameter.grad = None
        totals = torch.zeros(len(micro_batches) + len(self.layers.trained), dtype=torch.float64)
        if share:
            losses = self.pipeline.step_at(step, share.start, micro_batches[share.start : share.stop], compute_loss)
            if assignment.stage_of(rank) == 0:
                totals[share.start : share.stop] = losses.double().cpu()
        self.groups.sum_gradients(parameters, self.counts)
        if place == 0:
            self._add_norms(totals[len(micro_batches) :], parameters)
        dist.all_reduce(totals)
        norm = float(totals[len(micro_batches) :].sum().sqrt())
        record = Record(totals[: len(micro_batches)].tolist(), norm)
        self._commit(step, {**record._asdict(), "samples": list(samples), "generation": self.generation, "step": step})
        return record

    def _add_norms(self, squares: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """The square of the norm of every parameter, each in its place: equal on all ranks, in whatever order."""
        places = {name: place for place, name in enumerate(self.layers.trained)}
        for name, parameter in parameters.items():
            if self.counts[name] and parameter.grad is not None:
                squares[places[name]] = float(parameter.grad.float().pow(2).sum())

    def _gather(self, step: int) -> None:
        assert self.groups is not None
        assignment, rank = self.groups.assignment, self.groups.rank
        holders = assignment.holders(self.layers.map.modules, self.planner.templates)
        world = range(dist.get_world_size())
        held = {place: [path for path, ranks in holders.items() if place in ranks] for place in world}
        every = dict.fromkeys(world, list(self.layers.map.modules))
        received = exchange(rank, copies(self.layers.bytes, held, every), self.layers.state_of)
        key = f"whole/{self.generation}.{self.rounds}/{step}"
        if self.membership.store.add(f"{key}/done", 1) == len(world):
            self.membership.decide(key, "whole")
        self._agreed(key, "whole")
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self.layers.install(received, self.layers.map.modules)
