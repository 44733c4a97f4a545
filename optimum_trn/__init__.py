"""Hugging Face training for AWS Trainium that runs on any machine.

Importing the package installs the simulated NeuronCores as PyTorch's device `neuron`, unless OPTIMUM_TRN_DEVICE=cpu or
the real Neuron device is there; transformers is imported when one of the names below is used first.
"""

import importlib
import os
from typing import Any

from optimum_trn.device import check_platform, device_type

__version__ = "0.1.0.dev0"

_HOMES = {
    "NeuronTrainer": "optimum_trn.trainer",
    "NeuronTrainerMixin": "optimum_trn.trainer",
    "NeuronSeq2SeqTrainer": "optimum_trn.trainer",
    "NeuronSeq2SeqTrainingArguments": "optimum_trn.trainer",
    "NeuronTrainingArguments": "optimum_trn.trainer",
    "NeuronAccelerator": "optimum_trn.trainer.loop",
    "NeuronDPOConfig": "optimum_trn.trainer.trl_trainers",
    "NeuronDPOTrainer": "optimum_trn.trainer.trl_trainers",
    "NeuronRewardConfig": "optimum_trn.trainer.trl_trainers",
    "NeuronRewardTrainer": "optimum_trn.trainer.trl_trainers",
    "NeuronSFTConfig": "optimum_trn.trainer.trl_trainers",
    "NeuronSFTTrainer": "optimum_trn.trainer.trl_trainers",
    "NeuronModel": "optimum_trn.modeling",
    "NeuronModelForCausalLM": "optimum_trn.modeling",
    "NeuronModelForImageClassification": "optimum_trn.modeling",
    "NeuronModelForImageTextToText": "optimum_trn.modeling",
    "NeuronModelForMaskedLM": "optimum_trn.modeling",
    "NeuronModelForQuestionAnswering": "optimum_trn.modeling",
    "NeuronModelForSeq2SeqLM": "optimum_trn.modeling",
    "NeuronModelForSequenceClassification": "optimum_trn.modeling",
    "NeuronModelForTokenClassification": "optimum_trn.modeling",
    "consolidate": "optimum_trn.checkpoint.consolidate",
    "ParallelConfig": "optimum_trn.parallel",
    "patch_model": "optimum_trn.patching",
    "unpatch_model": "optimum_trn.patching",
    "register_plan": "optimum_trn.patching",
    "get_plan": "optimum_trn.patching",
    "infer_plan": "optimum_trn.patching",
    "declaration": "optimum_trn.patching",
    "Region": "optimum_trn.patching",
    "supported_models": "optimum_trn.patching",
    "ModelPlan": "optimum_trn.patching",
    "Stack": "optimum_trn.patching",
    "OneOf": "optimum_trn.patching",
    "Where": "optimum_trn.patching",
    "FusedAttention": "optimum_trn.patching",
    "LatentAttention": "optimum_trn.patching",
    "FusedGatedMLP": "optimum_trn.patching",
    "Experts": "optimum_trn.patching",
    "Schedule": "optimum_trn.patching",
    "Attention": "optimum_trn.patching",
    "GatedMLP": "optimum_trn.patching",
    "MLP": "optimum_trn.patching",
}
"""Where each public name is defined."""

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if device_type() == "neuron":
    check_platform()
    from optimum_trn.device.install import install

    # A script that never asked for the package (see optimum_trn_autoload) compiles only if it uses the device.
    install(load=os.environ.get("OPTIMUM_TRN_AUTOLOAD") != "1")
