"""What NeuronTrainer logs of the simulated hardware: graphs, cache hits, memory, step time, tokens a second, MFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..device import core_status, runtime
from ..device.recorded import graph_events
from ..device.step_graphs import StepGraphs, step_graphs
from ..device.step_price import Price, machine_of, precision_of, price
from ..hardware import GiB

logger = logging.get_logger(__name__)


class Pace:
    """What the steps of this process would take on the hardware, added up since the last look."""

    def __init__(self, graphs: StepGraphs):
        self.graphs = graphs
        self.machine = machine_of(runtime.instance().name, runtime.logical_core_size())
        self.precision = "fp32"
        self.tokens = self.steps = 0
        self.total = Price()
        self._prices: dict[tuple[int, int], Price] = {}
        graphs.on_step.append(self.step_ended)

    def step_ended(self) -> None:
        """Add the graphs of the step that ended."""
        self.steps += 1
        for number, _ in self.graphs.last_step:
            key = (self.graphs.generation, number)
            if key not in self._prices:
                events = graph_events(number)
                self._prices[key] = price(events, self.machine)
                if precision_of(events) != "fp32":
                    self.precision = "bf16"
            self.total += self._prices[key]

    def take(self, data_parallel: int) -> dict[str, float]:
        """Averages since the last call; nothing where a graph holds what has no price, such as compiled code."""
        steps, total, tokens = self.steps, self.total, self.tokens
        self.steps, self.total, self.tokens = 0, Price(), 0
        if not steps or not total.complete or not total.seconds:
            return {}
        rates = self.machine.core.mfu_flops
        return {
            "simulated_step_seconds": total.seconds / steps,
            "simulated_tokens_per_second": tokens * data_parallel / total.seconds,
            "simulated_mfu": total.flops / total.seconds / rates[self.precision],
        }

    def stop(self) -> None:
        """Follow no more steps."""
        self.graphs.on_step.remove(self.step_ended)


class SimulatedRunMixin:
    """The part of `NeuronTrainerMixin` that logs what the hardware would do, under names that begin with `simulated_`.

    Callbacks see these beside the loss; the history that checkpoints keep, and that runs are compared by, does not.
    """

    model: Any
    args: Any
    state: Any
    accelerator: Any
    _pace: Pace | None = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in Trainer; at the end it says what was compiled and why, and which lines broke graphs."""
        graphs = self._graphs()
        if graphs is None:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        self._pace = Pace(graphs)
        try:
            output: TrainOutput = super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._pace.stop()
            self._pace = None
        if self.state.is_world_process_zero:
            logger.info(graphs.summary())
        return output

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As in Trainer; counts the tokens."""
        if self._pace is not None and isinstance(inputs, Mapping):
            tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
            self._pace.tokens += tokens.numel() if isinstance(tokens, Tensor) else 0
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Any, Any]:
        """As in Trainer; every batch is a graph, or the graph of an evaluation would depend on how many there are."""
        result: tuple[Tensor | None, Any, Any] = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        if (graphs := self._graphs()) is not None:
            graphs.mark_step()
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer, with the figures of the simulation for callbacks."""
        graphs = self._graphs()
        simulated = {} if graphs is None else self._simulated(graphs, logs)
        logs.update(simulated)
        super().log(logs, start_time)  # type: ignore[misc]
        for name in simulated:  # the caller's numbers, and what is kept, are those of the training run
            del logs[name]
            self.state.log_history[-1].pop(name, None)

    def _simulated(self, graphs: StepGraphs, logs: Mapping[str, float]) -> dict[str, float]:
        if isinstance(logs.get("loss"), float):
            core_status.show_loss(logs["loss"])
        if "loss" not in logs and "train_runtime" not in logs:
            return {}
        graphs.collect()
        found = {} if self._pace is None else self._pace.take(self.accelerator.num_processes)
        return {
            **found,
            "simulated_hbm_peak_gib": runtime.max_memory_allocated() / GiB,
            "simulated_graphs_compiled": graphs.graphs - graphs.cache_hits,
            "simulated_cache_hits": graphs.cache_hits,
            "simulated_compile_seconds": graphs.compile_seconds,
            "simulated_graph_breaks": graphs.graph_breaks,
        }

    def _graphs(self) -> StepGraphs | None:
        return step_graphs() if self.args.device.type == "neuron" else None
