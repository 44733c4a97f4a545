"""The trainers of TRL for models that are sharded over NeuronCores; importing this needs `pip install trl`."""

from __future__ import annotations

from dataclasses import dataclass

from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from .arguments import NeuronTrainingArguments
from .trainer import NeuronTrainerMixin


@dataclass
class NeuronSFTConfig(SFTConfig, NeuronTrainingArguments):
    """`trl.SFTConfig` and the degrees of parallelism. Raises as `NeuronTrainingArguments`."""


@dataclass
class NeuronDPOConfig(DPOConfig, NeuronTrainingArguments):
    """`trl.DPOConfig` and the degrees of parallelism. Raises as `NeuronTrainingArguments`."""


@dataclass
class NeuronRewardConfig(RewardConfig, NeuronTrainingArguments):
    """`trl.RewardConfig` and the degrees of parallelism. Raises as `NeuronTrainingArguments`."""


class NeuronSFTTrainer(NeuronTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` for sharded models, packing and completion-only loss included."""


class NeuronDPOTrainer(NeuronTrainerMixin, DPOTrainer):
    """`trl.DPOTrainer` for sharded models; the reference model is sharded as the policy is."""


class NeuronRewardTrainer(NeuronTrainerMixin, RewardTrainer):
    """`trl.RewardTrainer` for sharded models with one label."""
