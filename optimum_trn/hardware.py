"""What Trainium chips and instances are: the only home of hardware numbers, each with its public source and date.

`SDK` in a source means the documentation repository github.com/aws-neuron/aws-neuron-sdk as of 2026-08-21. The Neuron
documentation mixes GB (1e9) and GiB; every figure here says which one it is by its unit.
"""

from dataclasses import dataclass

GiB = 1 << 30
TERA = 1e12


@dataclass(frozen=True)
class ChipSpec:
    """One Trainium chip.

    Rates are peaks of the whole chip: floating-point operations (dense) and bytes a second. `logical_core_size` is how
    many physical NeuronCores the runtime joins to one logical core by default (LNC); where `runs_torch_neuron` is False
    the hardware is driven through PyTorch/XLA and has no `torch.neuron`.
    """

    name: str
    physical_cores: int
    logical_core_sizes: tuple[int, ...]
    logical_core_size: int
    bf16_flops: float
    fp32_flops: float
    fp8_flops: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    neuronlink_bytes_per_second: float
    runs_torch_neuron: bool
    source: str

    def logical_cores(self, logical_core_size: int | None = None) -> int:
        """Logical NeuronCores on the chip; raises ValueError where the chip has no such LNC setting."""
        size = self.logical_core_size if logical_core_size is None else logical_core_size
        if size not in self.logical_core_sizes:
            allowed = " or ".join(map(str, self.logical_core_sizes))
            raise ValueError(f"A logical NeuronCore of {self.name} is {allowed} physical cores, not {size}.")
        return self.physical_cores // size

    def hbm_bytes_per_core(self, logical_core_size: int | None = None) -> int:
        """HBM bytes that belong to one logical core: an equal part of the chip's."""
        return self.hbm_bytes // self.logical_cores(logical_core_size)

    def bf16_flops_per_core(self, logical_core_size: int | None = None) -> float:
        """Peak BF16 operations a second of one logical core."""
        return self.bf16_flops / self.logical_cores(logical_core_size)


@dataclass(frozen=True)
class InstanceSpec:
    """One EC2 instance: how many chips, and on how many logical cores the runtime lets a job start.

    `launchable_cores` are counts at the chip's default LNC; a job's cores must also start at a multiple of its count.
    """

    name: str
    chip: ChipSpec
    num_chips: int
    launchable_cores: tuple[int, ...]
    host_memory_bytes: int | None
    network_bits_per_second: float | None
    source: str

    def num_cores(self, logical_core_size: int | None = None) -> int:
        """Logical NeuronCores of the instance."""
        return self.num_chips * self.chip.logical_cores(logical_core_size)

    def launchable(self, logical_core_size: int | None = None) -> tuple[int, ...]:
        """The core counts a job can be launched on; at another LNC the counts beyond one core scale with the cores."""
        default, cores = self.num_cores(), self.num_cores(logical_core_size)
        return tuple(sorted({1, *(count * cores // default for count in self.launchable_cores if count > 1)}))


TRAINIUM1 = ChipSpec(
    name="Trainium1",
    physical_cores=2,
    logical_core_sizes=(1,),
    logical_core_size=1,
    bf16_flops=190 * TERA,
    fp32_flops=47.5 * TERA,
    fp8_flops=190 * TERA,
    hbm_bytes=32 * GiB,
    hbm_bytes_per_second=820 * GiB,
    neuronlink_bytes_per_second=384e9,
    runs_torch_neuron=False,
    source="SDK: about-neuron/arch/neuron-hardware/trainium.rst, trn1-arch.rst (2026-08-21)",
)

TRAINIUM2 = ChipSpec(
    name="Trainium2",
    physical_cores=8,
    logical_core_sizes=(1, 2),
    logical_core_size=2,
    bf16_flops=667 * TERA,
    fp32_flops=181 * TERA,
    fp8_flops=1299 * TERA,
    hbm_bytes=96 * GiB,
    hbm_bytes_per_second=2.9e12,
    neuronlink_bytes_per_second=1.28e12,
    runs_torch_neuron=True,
    source="SDK: about-neuron/arch/neuron-hardware/trainium2.rst, "
    "about-neuron/arch/neuron-features/logical-neuroncore-config.rst (2026-08-21)",
)

TRAINIUM3 = ChipSpec(
    name="Trainium3",
    physical_cores=8,
    logical_core_sizes=(1, 2),
    logical_core_size=2,
    bf16_flops=671 * TERA,
    fp32_flops=183 * TERA,
    fp8_flops=2517 * TERA,
    hbm_bytes=144 * GiB,
    hbm_bytes_per_second=4.9e12,
    neuronlink_bytes_per_second=2.56e12,
    runs_torch_neuron=True,
    source="SDK: about-neuron/arch/neuron-hardware/trainium3.rst (2026-08-21)",
)

# Core counts: SDK: archive/nxd-training/training-troubleshooting.rst names trn1.2xlarge, trn1.32xlarge and
# trn2.48xlarge; trn1n.32xlarge has the same board as trn1.32xlarge, and trn2.3xlarge is one chip of trn2.48xlarge.
INSTANCES: dict[str, InstanceSpec] = {
    spec.name: spec
    for spec in (
        InstanceSpec(
            name="trn1.2xlarge",
            chip=TRAINIUM1,
            num_chips=1,
            launchable_cores=(1, 2),
            host_memory_bytes=32 * GiB,
            network_bits_per_second=25e9,
            source="SDK: about-neuron/arch/neuron-hardware/trn1-arch.rst (2026-08-21)",
        ),
        InstanceSpec(
            name="trn1.32xlarge",
            chip=TRAINIUM1,
            num_chips=16,
            launchable_cores=(1, 2, 8, 32),
            host_memory_bytes=512 * GiB,
            network_bits_per_second=800e9,
            source="SDK: about-neuron/arch/neuron-hardware/trn1-arch.rst (2026-08-21)",
        ),
        InstanceSpec(
            name="trn1n.32xlarge",
            chip=TRAINIUM1,
            num_chips=16,
            launchable_cores=(1, 2, 8, 32),
            host_memory_bytes=512 * GiB,
            network_bits_per_second=1600e9,
            source="SDK: about-neuron/arch/neuron-hardware/trn1-arch.rst (2026-08-21)",
        ),
        InstanceSpec(
            name="trn2.3xlarge",
            chip=TRAINIUM2,
            num_chips=1,
            launchable_cores=(1, 4),
            host_memory_bytes=None,
            network_bits_per_second=None,
            source="SDK: deploy/files/manifests/daemonset.yaml names it (2026-08-21); one chip by price tables",
        ),
        InstanceSpec(
            name="trn2.48xlarge",
            chip=TRAINIUM2,
            num_chips=16,
            launchable_cores=(1, 4, 16, 64),
            host_memory_bytes=2048 * GiB,
            network_bits_per_second=3200e9,
            source="SDK: about-neuron/arch/neuron-hardware/trn2-arch.rst (2026-08-21)",
        ),
    )
}

DEFAULT_INSTANCE = "trn2.3xlarge"


def get_instance(name: str) -> InstanceSpec:
    """The instance of that name; raises ValueError with the known names otherwise."""
    if name not in INSTANCES:
        raise ValueError(f"Unknown Trainium instance {name!r}; known are {', '.join(INSTANCES)}.")
    return INSTANCES[name]
