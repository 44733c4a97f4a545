"""The `torch.neuron` module: the simulated cores of one process, under the API of the native Neuron backend.

The names and error texts are those of TorchNeuron (github.com/aws-neuron/aws-neuron-sdk, frameworks/torch/
pytorch-native-overview.rst, 2026-08-21). Importing this module, counting cores and seeding create nothing; the core is
chosen on the first real use.
"""

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch

from optimum_trn import hardware
from optimum_trn.device import core_status
from optimum_trn.device.build import load_extension
from optimum_trn.device.step_graphs import start as start_step_graphs
from optimum_trn.device.step_graphs import step_graphs

logger = logging.getLogger(__name__)

DeviceLike = torch.device | int | str | None

Stream = torch.Stream
Event = torch.Event

_initialized = False  # torch.utils.checkpoint reads this name to decide whether there is a device RNG to stash
_forked = False
_pending_seed: int | None = None
_lock = threading.RLock()


# ---------------------------------------------------------------- what is simulated, and what this process sees of it


def instance() -> hardware.InstanceSpec:
    """The simulated instance, from OPTIMUM_TRN_INSTANCE (default: hardware.DEFAULT_INSTANCE)."""
    return hardware.get_instance(os.environ.get("OPTIMUM_TRN_INSTANCE", hardware.DEFAULT_INSTANCE))


def logical_core_size() -> int:
    """Physical cores per logical core (LNC), from NEURON_LOGICAL_NC_CONFIG or the chip's default."""
    text = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
    if text is None:
        return instance().chip.logical_core_size
    if not text.isdecimal():
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG={text!r} is not a number; set 1 or 2.")
    instance().chip.logical_cores(int(text))  # raises where the chip has no such setting
    return int(text)


def _parse_core_list(text: str) -> tuple[int, ...]:
    """Core numbers of a NEURON_RT_VISIBLE_CORES value such as "0", "0-3" or "1,4"."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f'NEURON_RT_VISIBLE_CORES={text!r} is not a core list; write "0", "0-3" or "1,4".')
        cores += range(int(first), int(last or first) + 1)
    if not cores or len(set(cores)) != len(cores):
        raise ValueError(f"NEURON_RT_VISIBLE_CORES={text!r} names no core, or one twice.")
    return tuple(cores)


def visible_cores() -> tuple[int, ...]:
    """Logical cores of the instance that this process sees, in the order of their device index.

    NEURON_RT_VISIBLE_CORES wins over NEURON_RT_NUM_CORES (0 means all). Where one of them is set, the hardware's launch
    rules hold: RuntimeError for cores that the instance has not, and for a count or a start it cannot launch.
    """
    spec, total = instance(), instance().num_cores(logical_core_size())
    core_list, core_count = os.environ.get("NEURON_RT_VISIBLE_CORES"), os.environ.get("NEURON_RT_NUM_CORES")
    if core_list:
        cores = _parse_core_list(core_list)
    elif core_count and core_count != "0":
        if not core_count.isdecimal():
            raise ValueError(f"NEURON_RT_NUM_CORES={core_count!r} is not a number of cores.")
        cores = tuple(range(int(core_count)))
    else:
        return tuple(range(total))
    if max(cores) >= total:
        raise RuntimeError(
            f"NeuronCore(s) not available - Requested:nc{cores[0]}-nc{cores[-1]} Available:{total}. {spec.name} has "
            f"logical cores 0 to {total - 1}; OPTIMUM_TRN_INSTANCE simulates a larger instance."
        )
    launchable = spec.launchable(logical_core_size())
    contiguous = cores == tuple(range(cores[0], cores[0] + len(cores)))
    if len(cores) not in launchable or (contiguous and cores[0] % len(cores) != 0):
        raise RuntimeError(
            f"NeuronCore(s) not available - Requested:nc{cores[0]}-nc{cores[-1]} Available:{total}. A job on "
            f"{spec.name} takes {_alternatives(launchable)} cores, starting at a multiple of that count, but "
            f"{len(cores)} starting at core {cores[0]} were asked for; change NEURON_RT_VISIBLE_CORES or "
            "NEURON_RT_NUM_CORES."
        )
    return cores


def _alternatives(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _local_core(count: int) -> int:
    """The device index that belongs to this process: LOCAL_RANK, or the only core there is."""
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if count == 1 and os.environ.get("NEURON_RT_VISIBLE_CORES"):
        return 0  # every process was given its own core by name
    if max(local_rank + 1, local_world) > count:
        raise RuntimeError(
            f"{max(local_rank + 1, local_world)} local processes, but {instance().name} shows {count} logical "
            f"NeuronCores, one per process. Start at most {count}, or simulate a larger instance: "
            "OPTIMUM_TRN_INSTANCE=trn2.48xlarge."
        )
    launchable = instance().launchable(logical_core_size())
    if local_rank == 0 and local_world not in launchable:
        logger.warning(
            "%d processes run on the simulator, but could not be launched on %s, where a job takes %s NeuronCores.",
            local_world,
            instance().name,
            _alternatives(launchable),
        )
    return local_rank


# ---------------------------------------------------------------------------------------------------- initialisation


def _extension() -> ModuleType:
    """The compiled device; built first where that has not happened yet."""
    if _forked:
        raise RuntimeError(
            "Cannot re-initialize Neuron runtime in forked subprocess. To use Neuron with multiprocessing, "
            "use the 'spawn' start method"
        )
    return load_extension()


def _lazy_init() -> None:
    """Load the device and choose this process's core; PyTorch calls it before the first tensor on the device."""
    global _initialized
    extension = _extension()
    with _lock:
        if _initialized:
            return
        cores = visible_cores()
        core = _local_core(len(cores))
        if not instance().chip.runs_torch_neuron:
            logger.warning(
                "%s has %s chips, which PyTorch/XLA drives: the device 'neuron' exists for Trn2 and Trn3 only. The "
                "simulation goes on with the memory and the core counts of %s.",
                instance().name,
                instance().chip.name,
                instance().name,
            )
        extension.configure(len(cores), instance().chip.hbm_bytes_per_core(logical_core_size()), core)
        graphs = start_step_graphs(extension, target=instance().name.partition(".")[0])
        core_status.start(graphs, instance().name, logical_core_size(), cores[core], core)
        _initialized = True
        if _pending_seed is not None:
            manual_seed_all(_pending_seed)


def _mark_forked() -> None:
    global _forked
    _forked = _initialized


os.register_at_fork(after_in_child=_mark_forked)


def init() -> None:
    """Initialise the device now instead of on first use."""
    _lazy_init()


def is_initialized() -> bool:
    """Whether this process has chosen its core."""
    return _initialized and not _forked


def _is_in_bad_fork() -> bool:
    return _forked


# ------------------------------------------------------------------------------------------------------------ devices


def is_available() -> bool:
    """True: the simulator needs no hardware, but its extension must have been compiled."""
    if not _forked:
        _extension()
    return True


def device_count() -> int:
    """Number of logical cores this process sees; creates nothing."""
    return len(visible_cores())


def current_device() -> int:
    """Index of the selected core; chooses it on first use."""
    _lazy_init()
    index: int = _extension().current_device()
    return index


def _index(device: DeviceLike) -> int:
    """Index of a device argument; None and "neuron" are the current core. Raises ValueError for another device."""
    if device is None:
        return current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "neuron":
            raise ValueError(f"Expected a neuron device, but got {device}.")
        if device.index is None:
            return current_device()
        device = device.index
    if not 0 <= device < device_count():
        raise ValueError(f"Invalid device id: {device}. Valid range is 0 to {device_count() - 1}")
    return device


def set_device(device: DeviceLike) -> None:
    """Select a core; raises ValueError for one that is not there."""
    index = _index(device)
    _lazy_init()
    _extension().set_device(index)


class device:
    """Context manager that selects a core and restores the previous one; None or -1 changes nothing."""

    def __init__(self, device: DeviceLike):
        self.index = None if device is None or device == -1 else _index(device)
        self.previous: int | None = None

    def __enter__(self) -> "device":
        if self.index is not None:
            self.previous = current_device()
            set_device(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.previous is not None:
            set_device(self.previous)


@dataclass(frozen=True)
class NeuronDeviceProperties:
    """What `get_device_properties` tells: the kind of core, and its HBM in bytes."""

    name: str
    total_memory: int


def get_device_name(device: DeviceLike = None) -> str:
    """The device as text, as on the hardware: "neuron:0"."""
    return f"neuron:{_index(device)}"


def get_device_properties(device: DeviceLike = None) -> NeuronDeviceProperties:
    """Kind and HBM of a core."""
    _index(device)
    size = logical_core_size()
    name = f"{instance().chip.name} NeuronCore, LNC={size} (simulated)"
    return NeuronDeviceProperties(name, instance().chip.hbm_bytes_per_core(size))


def get_device_capability(device: DeviceLike = None) -> None:
    """None: capability versions are CUDA's."""
    _index(device)


def synchronize(device: DeviceLike = None) -> None:
    """Return when the core has finished, which ends a step graph; operators are finished when they return."""
    _index(device)
    if (graphs := step_graphs()) is not None:
        graphs.mark_step()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: every Trainium computes in bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may compute in; float16 would need loss scaling, which Neuron does without."""
    return [torch.bfloat16]


# ------------------------------------------------------------------------------------------------- streams and events


class StreamContext:
    """Context manager that selects a stream; work is immediate, so only the bookkeeping changes."""

    def __init__(self, stream: torch.Stream | None):
        self.stream = stream
        self.previous: torch.Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.previous = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.previous is not None:
            set_stream(self.previous)


def stream(stream: torch.Stream | None) -> StreamContext:
    """`with torch.neuron.stream(s):` runs what follows on that stream."""
    return StreamContext(stream)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """The selected stream of a core."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """The stream that work runs on unless another is selected."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type_number())


def set_stream(stream: torch.Stream) -> None:
    """Select a stream."""
    torch.accelerator.set_stream(stream)


def _device_type_number() -> int:
    return int(torch.Stream(device="neuron").device_type)


# ------------------------------------------------------------------------------------------------------------- memory


def empty_cache() -> None:
    """Give cached HBM back to the host."""
    if _initialized:
        torch.accelerator.empty_cache()


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Counters of the allocator, by the names of `torch.accelerator.memory_stats`."""
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors hold."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Peak of `memory_allocated` since the start or the last reset."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that the allocator holds, cached ones included."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Peak of `memory_reserved` since the start or the last reset."""
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start the peaks again from what is in use."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Start the totals of allocated and freed bytes again."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total HBM bytes of a core."""
    free, total = torch.accelerator.get_memory_info(_index(device))
    return free, total


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """A small table of HBM use, for people."""
    index = _index(device)
    rows = {
        "allocated": (memory_allocated(index), max_memory_allocated(index)),
        "reserved": (memory_reserved(index), max_memory_reserved(index)),
    }
    total = get_device_properties(index).total_memory
    lines = [f"neuron:{index}, {total / hardware.GiB:.0f} GiB of HBM", f"{'':12}{'MiB now':>12}{'MiB peak':>12}"]
    lines += [f"{name:12}{now / 2**20:12.1f}{peak / 2**20:12.1f}" for name, (now, peak) in rows.items()]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------- random numbers


def _generator(device: DeviceLike) -> torch.Generator:
    generator: torch.Generator = _extension().default_generator(_index(device))
    return generator


def manual_seed(seed: int) -> None:
    """Seed the current core's generator."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every core's generator; before first use the seed is remembered and nothing is created."""
    global _pending_seed
    if not _initialized:
        _pending_seed = int(seed)
        return
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the current core's generator from the system's entropy."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed every core's generator with one random seed."""
    manual_seed_all(_generator(None).seed())


def initial_seed() -> int:
    """The seed that the current core's generator started from."""
    return _generator(None).initial_seed()


def get_rng_state(device: DeviceLike = "neuron") -> torch.Tensor:
    """State of a core's generator: 16 bytes, seed and offset."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "neuron") -> None:
    """Restore what `get_rng_state` returned."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all cores' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restore what `get_rng_state_all` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
