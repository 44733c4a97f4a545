"""Who does what in a generation: the pipelines, the stage of every rank, and who reduces which gradients together."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from optimum_trn.elastic.instantiate import distribute, instantiate
from optimum_trn.elastic.reconfigure import Pipelines, reconfigure
from optimum_trn.elastic.templates import PipelineTemplate, make_templates, template_sizes
from optimum_trn.patching.stage_map import StageMap


@dataclass(frozen=True)
class Planner:
    """Templates of one job, and the rules by which its nodes make pipelines: the same in every process."""

    minimum: int
    losses: int
    sizes: range
    templates: Mapping[int, PipelineTemplate]
    micro_batches: int

    @classmethod
    def of_job(
        cls, layers: Sequence[float], nodes: int, devices: int, minimum: int, losses: int, micro_batches: int
    ) -> Planner:
        """For a job of that many nodes; raises `PlanError` where it can't keep its promise."""
        sizes = template_sizes(nodes, minimum, losses)
        return cls(minimum, losses, sizes, make_templates(layers, sizes, devices), micro_batches)

    def first(self, members: Sequence[int]) -> Pipelines:
        """The pipelines with which the job starts."""
        sizes = instantiate(len(members), self.losses, self.micro_batches, self.templates)
        ends = list(accumulate(sizes))
        return tuple(tuple(members[end - size : end]) for size, end in zip(sizes, ends, strict=True))

    def next(self, pipelines: Pipelines, members: Sequence[int]) -> tuple[Pipelines, tuple[str, ...]]:
        """The pipelines when only these members are left, or have come, and what was done to get there."""
        before = {member for pipeline in pipelines for member in pipeline}
        found = reconfigure(
            pipelines,
            before - set(members),
            self.minimum,
            self.sizes,
            self.losses,
            [member for member in members if member not in before],
            self.micro_batches,
        )
        return found.pipelines, found.actions

    def shares(self, pipelines: Pipelines, micro_batches: int) -> list[range]:
        """The micro-batches of each pipeline: neighbours, and none for some where a last step has too few."""
        templates = [self.templates[len(pipeline)] for pipeline in pipelines]
        fed = min(len(templates), micro_batches)
        counts = distribute(micro_batches, templates[:fed]) + [0] * (len(templates) - fed)
        ends = list(accumulate(counts))
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


@dataclass(frozen=True)
class Assignment:
    """The pipelines of a generation over its processes, whose ranks go by member and place in the node."""

    pipelines: Pipelines
    members: tuple[int, ...]
    devices: int
    actions: tuple[str, ...] = ()
    step: int = 0

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Assignment:
        """What `to_json` has written."""
        fields = json.loads(text)
        pipelines = tuple(tuple(pipeline) for pipeline in fields["pipelines"])
        return cls(pipelines, tuple(fields["members"]), fields["devices"], tuple(fields["actions"]), fields["step"])

    def rank_of(self, member: int, local: int) -> int:
        """The rank of a process."""
        return self.members.index(member) * self.devices + local

    def ranks(self, pipeline: int) -> list[int]:
        """The ranks of a pipeline, in the order of its stages."""
        return [self.rank_of(member, local) for member in self.pipelines[pipeline] for local in range(self.devices)]

    def pipeline_of(self, rank: int) -> int:
        """The pipeline of a rank."""
        member = self.members[rank // self.devices]
        return next(place for place, pipeline in enumerate(self.pipelines) if member in pipeline)

    def stage_of(self, rank: int) -> int:
        """The stage of a rank in its pipeline."""
        return self.ranks(self.pipeline_of(rank)).index(rank)

    def holders(self, modules: Mapping[str, int], templates: Mapping[int, PipelineTemplate]) -> dict[str, list[int]]:
        """The ranks that have each module, one in every pipeline, in the order of the pipelines; by its layer."""
        found: dict[str, list[int]] = {path: [] for path in modules}
        for place, pipeline in enumerate(self.pipelines):
            ranks, ends = self.ranks(place), templates[len(pipeline)].ends
            for path, layer in modules.items():
                found[path].append(ranks[bisect_right(ends, layer)])
        return found


def cut(layers: StageMap, template: PipelineTemplate) -> StageMap:
    """A map in which every layer is a stage of its own, cut into the stages of a template."""
    return replace(layers, modules={path: bisect_right(template.ends, at) for path, at in layers.modules.items()})
