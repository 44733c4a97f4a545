"""What the engines of an accelerator core do in a second, and how cores, chips and nodes are linked.

Capacities of Trainium chips and instances are in hardware.py; here is what only pricing needs. `SDK` in a source is the
documentation repository github.com/aws-neuron/aws-neuron-sdk as of 2026-08-21.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from optimum_trn.hardware import INSTANCES, TERA, TRAINIUM3, ChipSpec

Precision = Literal["fp32", "bf16_sr", "autocast"]
"""float32 throughout; bfloat16 throughout, with stochastic rounding; or bfloat16 weights and products, with gradients,
moments and master weights in float32."""


@dataclass(frozen=True, eq=False)
class Core:
    """One accelerator core, as ranks see it.

    The matrix engine multiplies `rows` x `columns` of a stationary operand with up to `moving` columns of the other at
    a time, and needs `matrix_overhead` more cycles for each such instruction. The vector engines pass `vector_rate`
    elements a second, and need the time of `vector_overhead` more in each lane for an instruction. `mfu_flops` is the
    peak that model FLOPs utilisation is quoted against.
    """

    matrix_flops: Mapping[str, float]
    mfu_flops: Mapping[str, float]
    rows: int
    columns: int
    moving: int
    matrix_overhead: float
    vector_rate: float
    vector_overhead: float
    hbm_bytes_per_second: float
    hbm_bytes: int
    source: str


@dataclass(frozen=True)
class Latency:
    """Seconds of a collective that do not depend on bandwidth, and what it reaches of the network's.

    `launch` starts it, `hop` takes a message to the next core of a ring, `crossing` one to another node: of 8 bytes,
    more for each doubling of the collective's bytes, and at most. `network_share` is of the line rate. A library that
    is `recursive` halves and doubles between nodes, others go round them in a ring.
    """

    launch: float
    hop: float
    crossing: tuple[float, float, float]
    network_share: float
    recursive: bool


NEURON_LATENCY = Latency(launch=50e-6, hop=3.2e-6, crossing=(136e-6, 23e-6, 500e-6), network_share=0.6, recursive=True)
"""Launch and hop from nccom-test's all-reduce over 2 ranks and all-gather over 32, the others from its all-reduce over
2 nodes of 32 (SDK tools/neuron-sys-tools/nccom-test.rst). Later chips have no published table and are taken alike."""

NCCL_LATENCY = Latency(launch=10e-6, hop=1e-6, crossing=(15e-6, 0.0, 15e-6), network_share=0.85, recursive=False)
"""15 microseconds between nodes over EFA (SDK neuron-runtime/about/collectives.rst); 0.85 of the line rate, an
assumption that reproduces the scaling of MiCS (arXiv:2205.00119); the rest assumed."""


@dataclass(frozen=True, eq=False)
class Machine:
    """One node: its cores, the links between its chips and the network between nodes.

    `ring_bytes_per_second` is what a ring collective passes through each core, `link_bytes_per_second` what one link
    between neighbouring chips carries one way. Chips form a torus of `torus` rows and columns, or, where that is None,
    a switch gives every chip its full rate.
    """

    name: str
    core: Core
    cores_per_chip: int
    num_chips: int
    torus: tuple[int, int] | None
    ring_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    latency: Latency
    launchable: tuple[int, ...]
    vendor: Literal["trainium", "nvidia"]
    source: str

    @property
    def num_cores(self) -> int:
        """Cores of the node: ranks that it runs."""
        return self.num_chips * self.cores_per_chip


RING_SHARE = 57e9 / 96e9
"""Of a link's rate, what ring collectives reach: 57 GB/s in the nccom-test tables (see collectives.py) of 384 / 4."""


def _trainium_core(chip: ChipSpec, lnc: int, bf16: float, fp32: float, vector_clock: float, source: str) -> Core:
    cores = chip.logical_cores(lnc)
    rates = {"bf16": bf16, "fp32": fp32}
    return Core(
        matrix_flops=rates,
        mfu_flops=rates,
        rows=128,
        columns=128,
        moving=512,
        matrix_overhead=64,
        vector_rate=128 * vector_clock * lnc,
        vector_overhead=100,
        hbm_bytes_per_second=chip.hbm_bytes_per_second / cores,
        hbm_bytes=chip.hbm_bytes // cores,
        source=source,
    )


def _trainium(name: str, lnc: int, core: Core, chip: ChipSpec, neuronlink: float) -> Machine:
    spec = INSTANCES[name]
    network = spec.network_bits_per_second
    assert network is not None
    return Machine(
        name=name if lnc == chip.logical_core_size else f"{name}-lnc{lnc}",
        core=core,
        cores_per_chip=chip.logical_cores(lnc),
        num_chips=spec.num_chips,
        torus=(4, 4) if spec.num_chips == 16 else (1, spec.num_chips),
        ring_bytes_per_second=neuronlink / 4 * RING_SHARE,
        link_bytes_per_second=neuronlink / 4,
        network_bytes_per_second=network / 8,
        latency=NEURON_LATENCY,
        launchable=spec.launchable(lnc),
        vendor="trainium",
        source=spec.source,
    )


# NeuronCore-v2: 128 x 128 elements, at most 512 moving columns, about 64 cycles to start; VectorE 1.12 GHz, 128 lanes,
# about 100 cycles an instruction (SDK nki/guides/architecture/trainium_inferentia2_arch.rst). The scalar engine works
# beside VectorE and is not counted. The peak is that of AWS's own MFU, 3040 / 32 TFLOPS (aws-neuron-samples,
# dp_bert_large_hf_pretrain_hdf5.py).
def _machines() -> dict[str, Machine]:
    trn1, trn2 = INSTANCES["trn1.32xlarge"].chip, INSTANCES["trn2.48xlarge"].chip
    v2 = _trainium_core(
        trn1, 1, 95 * TERA, 23.75 * TERA, 1.12e9, "SDK nki/guides/architecture/trainium_inferentia2_arch.rst"
    )
    found = [
        _trainium("trn1.2xlarge", 1, v2, trn1, trn1.neuronlink_bytes_per_second),
        _trainium("trn1.32xlarge", 1, v2, trn1, trn1.neuronlink_bytes_per_second),
        # Twice the NeuronLink of trn1.32xlarge: SDK about-neuron/arch/neuron-hardware/trn1-arch.rst.
        _trainium("trn1n.32xlarge", 1, v2, trn1, 2 * trn1.neuronlink_bytes_per_second),
    ]
    # NeuronCore-v3: VectorE 0.96 GHz: SDK nki/guides/architecture/trainium2_arch.rst. The peak at
    # LNC 2 is 157 TFLOPS in AWS's own figures (torch-neuronx docs, torchtitan/gpt-oss README).
    for lnc in (2, 1):
        v3 = _trainium_core(
            trn2,
            lnc,
            157 * TERA * lnc / 2,
            trn2.fp32_flops / trn2.logical_cores(lnc),
            0.96e9,
            "SDK nki/guides/architecture/trainium2_arch.rst",
        )
        found.append(_trainium("trn2.48xlarge", lnc, v3, trn2, trn2.neuronlink_bytes_per_second))
    found += [_trainium3(lnc) for lnc in (2, 1)]
    found.append(_p4d())
    return {machine.name: machine for machine in found}


def _trainium3(lnc: int) -> Machine:
    """A Trn3 Gen1 UltraServer. Its vector engines' clocks are not published: those of Trainium2 stand in."""
    chip, cores = TRAINIUM3, TRAINIUM3.logical_cores(lnc)
    source = "SDK about-neuron/arch/neuron-hardware/trn3-arch.rst; vector clocks assumed equal to Trainium2's"
    core = _trainium_core(chip, lnc, chip.bf16_flops / cores, chip.fp32_flops / cores, 0.96e9, source)
    return Machine(
        name="trn3.ultraserver" if lnc == 2 else "trn3.ultraserver-lnc1",
        core=core,
        cores_per_chip=cores,
        num_chips=64,
        torus=None,
        ring_bytes_per_second=chip.neuronlink_bytes_per_second / 4 * RING_SHARE,
        link_bytes_per_second=chip.neuronlink_bytes_per_second / 4,
        network_bytes_per_second=12_800e9 / 8,
        latency=NEURON_LATENCY,
        launchable=tuple(cores * count for count in (1, 4, 16, 64)),
        vendor="trainium",
        source=source,
    )


def _p4d() -> Machine:
    """Eight A100 of 40 GB: 312 TFLOPS, 1.555 TB/s, 300 GB/s of NVLink each way, 400 Gbps (NVIDIA A100 datasheet; AWS).

    Elementwise rate: 19.5 TFLOPS of float32, half of it as elements, since an addition is half of a multiply-add.
    Tiles of 128 x 256 on 108 multiprocessors have no start-up that shows; the ring is
    assumed to reach 230 of 300 GB/s.
    """
    core = Core(
        matrix_flops={"bf16": 312 * TERA, "fp32": 19.5 * TERA},
        mfu_flops={"bf16": 312 * TERA, "fp32": 19.5 * TERA},
        rows=128,
        columns=128,
        moving=512,
        matrix_overhead=64,
        vector_rate=19.5 * TERA / 2,
        vector_overhead=0,
        hbm_bytes_per_second=1.555e12,
        hbm_bytes=40 * 10**9,
        source="NVIDIA A100 datasheet",
    )
    return Machine(
        name="p4d.24xlarge",
        core=core,
        cores_per_chip=1,
        num_chips=8,
        torus=None,
        ring_bytes_per_second=230e9,
        link_bytes_per_second=300e9,
        network_bytes_per_second=400e9 / 8,
        latency=NCCL_LATENCY,
        launchable=(1, 2, 4, 8),
        vendor="nvidia",
        source="aws.amazon.com/ec2/instance-types/p4; NVIDIA A100 datasheet",
    )


MACHINES: dict[str, Machine] = _machines()


def get_machine(name: str) -> Machine:
    """The machine of that name; raises ValueError with the known names otherwise."""
    if name not in MACHINES:
        raise ValueError(f"Unknown instance {name!r}; the cost model knows {', '.join(MACHINES)}.")
    return MACHINES[name]
