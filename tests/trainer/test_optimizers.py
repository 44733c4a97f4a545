"""Every optimizer of torch and every `optim=` of transformers trains as in one process, or is refused by its name."""

import numpy as np
import pytest
import torch
from transformers import Adafactor, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.tiny import KeepFloat64
from tests.trainer import scenario, stepwise

STEPS = 3


class Lamb(torch.optim.Optimizer):
    """A user's own optimizer, which steps in proportion to the norm of the parameter."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.5)
                    parameter.sub_(average * parameter.norm() / average.norm(), alpha=group["lr"])


class Normalized(torch.optim.SGD):
    """Steps by the direction of all gradients together."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


CLASSES = {
    name: optimizer
    for name, optimizer in vars(torch.optim).items()
    if isinstance(optimizer, type) and optimizer is not torch.optim.Optimizer
} | {"Lamb": Lamb}

OPTIONS = {
    "adafactor": {"optim_args": "scale_parameter=True,relative_step=False,decay_rate=-0.8"},
    "Adafactor": {"lr": 1e-2},
}

REFUSED = {
    "LBFGS": "LBFGS doesn't support per-parameter options",
    "SparseAdam": "SparseAdam",
    "adamw_torch_xla": "torch_xla",
    "adamw_torch_npu_fused": "torch_npu",
    "adamw_anyprecision": "torchdistx",
    **{
        name.value: "bnb|bitsandbytes"
        for name in OptimizerNames
        if "8bit" in name.value or "32bit" in name.value or "bnb" in name.value or name.value == "ademamix"
    },
    **{name.value: "galore_torch" for name in OptimizerNames if name.value.startswith("galore")},
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "lomo": "lomo",
    "adalomo": "lomo",
    "grokadamw": "grokadamw",
    "schedule_free_radam": "schedulefree",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_sgd": "schedulefree",
    "apollo_adamw": "apollo",
    "apollo_adamw_layerwise": "apollo",
    "stable_adamw": "torch-optimi",
}
"""What is not to be had: a library that is not installed, or what the optimizer itself can't do. The error says it."""

TRAINS = sorted({*CLASSES, *(name.value for name in OptimizerNames)} - REFUSED.keys())


def trained(trainer_class, arguments_class, name, directory, resume=None, dtype=torch.float64, **options):
    """Losses of a few steps, and the trainer."""
    model = scenario.llama(num_hidden_layers=1).to(dtype)
    if name == "Muon":  # takes matrices only
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    own = OPTIONS.get(name, {})
    from_class = {}
    if name in CLASSES or name == "Normalized":
        from_class = {"optimizer_cls_and_kwargs": (CLASSES.get(name, Normalized), {"lr": 1e-2, **own})}
        own = {}
    elif name in {optimizer.value for optimizer in OptimizerNames}:
        own = {"optim": name, **own}
    arguments = arguments_class(
        **{
            "output_dir": directory,
            "per_device_train_batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **own,
            **options,
        }
    )
    trainer = trainer_class(model=model, args=arguments, train_dataset=scenario.rows(12), **from_class)
    with KeepFloat64():
        trainer.train(resume_from_checkpoint=resume)
    return [log["loss"] for log in trainer.state.log_history if "grad_norm" in log], trainer


def outcomes(rank, world_size, directory, names, options):
    local_device()
    found = {}
    for name in names:
        try:
            found[name] = trained(NeuronTrainer, NeuronTrainingArguments, name, directory, **options)[0]
        except (ImportError, ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses by optimizer and rows of a batch, of one process."""
    found = {}

    def of(name, rows):
        if (name, rows) not in found:
            directory = str(tmp_path_factory.mktemp("stock"))
            options = {"use_cpu": True, "per_device_train_batch_size": rows}
            found[name, rows] = trained(Trainer, TrainingArguments, name, directory, **options)[0]
        return found[name, rows]

    return of


def check(found, expected, names, rows):
    for name in names:
        assert not isinstance(found[name], str), f"{name}: {found[name]}"
        # Muon computes in bfloat16, whose rounding depends on the last bit of a sum.
        tolerance = 1e-3 if name == "Muon" else 1e-6
        np.testing.assert_allclose(found[name], expected(name, rows), rtol=tolerance, err_msg=name)


LAYOUTS = {
    "TP2 x DP2 x ZeRO-1": (4, dict(tensor_parallel_size=2), 4),
    "ZeRO-1 x DP2": (2, dict(), 4),
    "TP2": (2, dict(tensor_parallel_size=2), 2),
    "TP2 x DP2": (4, dict(tensor_parallel_size=2, zero_1=False), 4),
    "MiCS 2": (2, dict(mics_partition_size=2), 4),
    "MiCS 2 x TP2": (4, dict(tensor_parallel_size=2, mics_partition_size=2), 4),
    "MiCS 2x2": (4, dict(mics_partition_size=2, per_device_train_batch_size=1), 4),
}


@pytest.mark.full
def test_optimizers_that_see_whole_parameters_train_on_shards_as_in_one_process(tmp_path, expected):
    world_size, options, rows = LAYOUTS["TP2 x DP2 x ZeRO-1"]
    names = ["Adafactor", "Muon", "adafactor"]
    for found in run_ranks(outcomes, world_size, str(tmp_path), names, options, environment=FLOAT64, timeout=180):
        check(found, expected, names, rows)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_optimizer_trains_as_in_one_process(tmp_path, expected, layout):
    world_size, options, rows = LAYOUTS[layout]
    for found in run_ranks(outcomes, world_size, str(tmp_path), TRAINS, options, environment=FLOAT64, timeout=600):
        check(found, expected, TRAINS, rows)


@pytest.mark.parametrize("layout", ["TP2", pytest.param("MiCS 2", marks=pytest.mark.full)])
def test_what_can_not_update_a_parameter_by_itself_is_refused_on_shards(tmp_path, layout):
    world_size, options, _ = LAYOUTS[layout]
    names = ["SparseAdam", "Normalized"]
    for found in run_ranks(outcomes, world_size, str(tmp_path), names, options, device="cpu"):
        for name in names:
            assert f"{name} updates a parameter by what it knows of others, or could not be tried" in found[name]


def test_what_can_not_be_had_is_refused_by_name(tmp_path):
    assert len(REFUSED) + len(TRAINS) == len({*CLASSES, *(name.value for name in OptimizerNames)})
    (found,) = run_ranks(outcomes, 1, str(tmp_path), sorted(REFUSED), {}, device="cpu")
    for name, reason in REFUSED.items():
        assert isinstance(found[name], str), f"{name} trains"
        assert any(word in found[name] for word in reason.split("|")), f"{name}: {found[name]}"


def interrupted(rank, world_size, directory, name, dtype, options):
    """The losses of a run that was resumed after its second step, and of one that was not."""
    local_device()
    options = {"save_strategy": "steps", "save_steps": 2, "dtype": dtype, **options}
    whole, _ = trained(NeuronTrainer, NeuronTrainingArguments, name, f"{directory}/whole", **options)
    resumed, _ = trained(
        NeuronTrainer,
        NeuronTrainingArguments,
        name,
        f"{directory}/resumed",
        f"{directory}/whole/checkpoint-2",
        **options,
    )
    return whole, resumed


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("TP2", torch.float64),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("TP2", torch.bfloat16),
                ("TP2 x DP2 x ZeRO-1", torch.bfloat16),
                ("MiCS 2", torch.float64),
                ("MiCS 2 x TP2", torch.bfloat16),
            ]
        ),
    ],
)
def test_an_optimizer_that_sees_whole_parameters_resumes_to_the_bit(tmp_path, layout, dtype):
    world_size, options, _ = LAYOUTS[layout]
    for whole, resumed in run_ranks(
        interrupted, world_size, str(tmp_path), "Lamb", dtype, options, environment=FLOAT64, timeout=180
    ):
        assert len(whole) == STEPS
        assert resumed == whole


def adafactor(parameters):
    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "degrees",
    [
        dict(expert_parallel_size=2, zero_1=False),
        dict(expert_parallel_size=2),
        dict(expert_parallel_size=2, tensor_parallel_size=2),
    ],
)
def test_adafactor_sees_whole_experts_that_are_shared_out(degrees):
    arguments = ("qwen3_moe", degrees, {}, 2, adafactor)
    for worst in run_ranks(stepwise.train, 2, *arguments, device="cpu", environment=FLOAT64):
        assert max(worst.values()) < stepwise.EXACT, worst
