"""NeuronTrainer on a PeftModel: what a user sees is what the stock Trainer shows, and its files are the stock ones."""

from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, pipeline_of
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.devices import local_device
from tests.distributed import run_ranks
from tests.trainer import scenario
from tests.trainer.test_parity import assert_same

ROWS = dict(train_rows=9, eval_rows=5)
PP2 = {"pipeline_parallel_size": 2}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def adapted(model, seed=3, **options):
    torch.manual_seed(seed)
    options = {"r": 4, "target_modules": TARGETS, "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM", **options}
    return get_peft_model(model, LoraConfig(**options))


def sharded(rank, world_size, directory, patched_first, options):
    if patched_first:
        stock = scenario.llama()
        patch_model(stock, ParallelConfig(2))
        model = adapted(stock.to(local_device()))
    else:
        model = adapted(scenario.llama(), seed=rank + 3)  # nobody promised equal generators: rank 0's values count
    result = scenario.run(
        NeuronTrainer,
        NeuronTrainingArguments,
        directory,
        model=model,
        **{"tensor_parallel_size": 2, **ROWS, **options},
    )
    sharded = {parameter.requires_grad for parameter in model.parameters() if isinstance(parameter, DTensor)}
    assert sharded == ({False} if "mics_partition_size" in options else set())
    return result, model.get_nb_trainable_parameters()


@pytest.mark.parametrize(
    "world_size, patched_first, options, own",
    [
        pytest.param(2, True, {}, {}, marks=pytest.mark.full),
        pytest.param(2, False, {}, {}),
        # Recomputation in frozen layers, on two copies of the model that share each row of sequences.
        pytest.param(4, False, {"gradient_checkpointing": True}, {"sequence_parallel": True}, marks=pytest.mark.full),
        # Each stage has its own adapters; the copied head is on the last one.
        (2, False, {}, {**PP2, "tensor_parallel_size": 1}),
        pytest.param(4, False, {}, {**PP2, "tensor_parallel_size": 1}, marks=pytest.mark.full),
        pytest.param(4, False, {"gradient_checkpointing": True}, PP2, marks=pytest.mark.full),
        # The frozen weights are sharded over the group, the adapters are not.
        (2, False, {}, {"tensor_parallel_size": 1, "mics_partition_size": 2}),
        pytest.param(4, False, {}, {"mics_partition_size": 2}, marks=pytest.mark.full),
    ],
)
def test_a_run_with_adapters_is_that_of_the_stock_trainer(tmp_path, world_size, patched_first, options, own):
    theirs = adapted(scenario.llama())
    degrees = {"tensor_parallel_size": 2, **own}
    copies = world_size // degrees["tensor_parallel_size"] // degrees.get("pipeline_parallel_size", 1)
    rows = {} if copies == 1 else {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    options = {**options, **({} if copies == 1 else {"train_rows": 8})}
    stock = scenario.run(
        Trainer, TrainingArguments, str(tmp_path / "stock"), model=theirs, use_cpu=True, **{**ROWS, **rows, **options}
    )
    arguments = str(tmp_path / "ours"), patched_first, {**options, **own}
    for result, counts in run_ranks(sharded, world_size, *arguments, device="neuron", timeout=180):
        assert_same(result, stock)
        assert counts == theirs.get_nb_trainable_parameters()
    ours, expected = (
        PeftModel.from_pretrained(scenario.llama(), tmp_path / name / "result") for name in ("ours", "stock")
    )
    inputs = {name: torch.stack([row[name] for row in scenario.rows(4)]) for name in ("input_ids", "labels")}
    torch.testing.assert_close(ours(**inputs).logits, expected(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert {p.name for p in (tmp_path / "ours" / "result").iterdir()} == {
        p.name for p in (tmp_path / "stock" / "result").iterdir()
    }


def resumed(rank, world_size, directory, degrees):
    def trainer():
        arguments = NeuronTrainingArguments(
            output_dir=directory,
            **degrees,
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
        )
        model = adapted(scenario.llama(attention_dropout=0.2), lora_dropout=0.3)
        return NeuronTrainer(model=model, args=arguments, train_dataset=scenario.rows(13))

    whole, continued = trainer(), trainer()
    whole.train()
    continued.train(resume_from_checkpoint=str(Path(directory, "checkpoint-2")))
    pairs = zip(whole.model.parameters(), continued.model.parameters(), strict=True)
    losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (whole, continued)]
    return losses, all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("degrees", [dict(tensor_parallel_size=2), pytest.param(PP2, marks=pytest.mark.full)])
def test_a_resumed_run_with_adapters_is_the_same_to_the_bit(tmp_path, degrees):
    for (whole, continued), same in run_ranks(resumed, 2, str(tmp_path), degrees, device="neuron"):
        assert len(whole) == 4 and whole == continued and same
    adapter = tmp_path / "checkpoint-4" / "adapter_model.safetensors"
    assert adapter.exists() and not (tmp_path / "checkpoint-4" / "model.safetensors").exists()


REFUSED = [
    (LoraConfig(use_dora=True, target_modules=TARGETS), "DoraLinearVariant.* use_dora=False"),
    (peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]), "q_proj: Linear.* LoRA is"),
    (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "Prompt learning .* Use LoRA"),
    (LoraConfig(target_modules=TARGETS, trainable_token_indices=[3]), "trainable_token_indices .* 'default'"),
]


def refused(rank, world_size, directory):
    arguments = NeuronTrainingArguments(output_dir=directory, tensor_parallel_size=2)
    for config, said in REFUSED:
        with pytest.raises(PlanError, match=said):
            NeuronTrainer(model=get_peft_model(scenario.llama(), config), args=arguments)


def test_what_does_not_compute_with_shards_is_refused_by_name(tmp_path):
    run_ranks(refused, 2, str(tmp_path), device="cpu")


def late(rank, world_size):
    model = scenario.llama()
    patch_model(model, ParallelConfig(**PP2))
    tuned = adapted(model)
    rows = {name: torch.stack([row[name] for row in scenario.rows(2)]) for name in ("input_ids", "labels")}
    with pytest.raises(PlanError, match="adapters default were added .* after the model was cut"):
        pipeline_of(tuned).step([rows])
    # What is refused once layers are cut leaves the adapters of all stages where they were.
    model = get_peft_model(scenario.llama(), LoraConfig(use_dora=True, target_modules=TARGETS))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = ParallelConfig(tensor_parallel_size=2, **PP2)
    with pytest.raises(PlanError, match="use_dora=False"):
        patch_model(model.get_base_model(), config)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(torch.equal(after[name], old) for name, old in before.items())


@pytest.mark.full
def test_adapters_that_come_after_the_cut_are_refused_and_others_left_alone(tmp_path):
    run_ranks(late, 4, device="cpu")
