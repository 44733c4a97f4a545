"""Every declared family at tensor parallel 2, 3 and 4, with and without sequence parallelism, is its stock self.

Several families share one job of the ranks, and all layouts of a class one computation of what its stock self does.
"""

import pytest

from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.families import families
from tests.models.proof import layouts
from tests.models.test_sequence import DECODERS

EXACT = 1e-9
TOGETHER = [families()[start::8] for start in range(8)]
KINDS = [  # device, tensor-parallel size, whether every class of a family or its main one
    *(("cpu", size, False, () if size == 4 else pytest.mark.full) for size in (2, 3, 4)),
    ("cpu", 2, True, pytest.mark.full),
    *(("neuron", size, size == 2, pytest.mark.full) for size in (2, 3, 4)),
]
JOBS = [
    pytest.param(
        device,
        size,
        every_class,
        model_types,
        id=f"{device}-{size}-{'every class of ' if every_class else ''}{'+'.join(model_types)}",
        marks=marks,
    )
    for device, size, every_class, marks in KINDS
    for model_types in TOGETHER
]


@pytest.mark.parametrize("device, size, every_class, model_types", JOBS)
def test_loss_gradients_norm_and_outputs_of_every_family_at_every_layout(device, size, every_class, model_types):
    """Sequence parallelism is proven on the main class of a family."""
    for results in run_ranks(layouts, size, model_types, every_class, device=device, environment=FLOAT64, timeout=400):
        for name, result in results.items():
            model_type, _, *sequence = name.split()
            if sequence and "refused" in result:
                assert model_type not in DECODERS and "sequence_parallel=True is for " in result["refused"]
                continue
            assert result["error"] < EXACT, (name, result)
            assert not result["control"] <= 1e-4, f"{name}: a part whose partial sum was lost changed no output"
            assert result["sharded"] < 0.8, f"{name}: hardly anything is sharded"
        for model_type in model_types:
            controls = [
                result["control"]
                for name, result in results.items()
                if name.startswith(f"{model_type} ") and "control" in result
            ]
            assert controls and (size > 2 or any(control > 0 for control in controls)), f"{model_type} has no control"
