"""Trainers of TRL on a mesh: the losses, gradients and metrics of every step are those of TRL in one process."""

import re
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.token_statistics import token_statistics
from optimum_trn.trainer import NeuronTrainerMixin
from tests.distributed import run_ranks
from tests.trainer.scenario import deterministic, llama
from tests.trainer.test_features import assert_same

trl = pytest.importorskip("trl", reason="the extra `trl` is not installed")

WORDS = [f"w{number}" for number in range(89)]
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }} {{ message['content'] }} </s> {% endfor %}"


def tokenizer():
    """One token a word, as many as the tiny Llama knows."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "u", "a", "s"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


def texts(count, seed, shortest=3, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        " ".join(WORDS[index] for index in torch.randint(len(WORDS), (length,), generator=generator))
        for length in lengths
    ]


def pairs(count=24, seed=0):
    return Dataset.from_dict(
        {"prompt": texts(count, seed), "completion": [f" {text}" for text in texts(count, seed + 1)]}
    )


def chats(count=24, seed=0):
    return Dataset.from_dict(
        {
            "messages": [
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                for question, answer in zip(texts(count, seed), texts(count, seed + 1), strict=True)
            ]
        }
    )


def preferences(count=24, seed=0):
    return Dataset.from_dict(
        {
            "prompt": texts(count, seed),
            "chosen": [f" {text}" for text in texts(count, seed + 1)],
            "rejected": [f" {text}" for text in texts(count, seed + 2)],
        }
    )


def reward_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = llama().config
        return LlamaForSequenceClassification(LlamaConfig(**{**config.to_dict(), "num_labels": 1}))


CASES = {
    "completion only": ("SFT", llama, pairs, dict(gradient_accumulation_steps=2)),
    "chat": ("SFT", llama, chats, {}),
    "packed": ("SFT", llama, pairs, dict(packing=True, max_length=16)),
    "packed across texts": ("SFT", llama, chats, dict(packing=True, packing_strategy="wrapped", max_length=16)),
    "dft on whole rows": ("SFT", llama, pairs, dict(completion_only_loss=False, loss_type="dft")),
    "adapters": ("SFT", llama, pairs, dict(adapters=True)),
    "dpo": ("DPO", llama, preferences, dict(beta=0.5)),
    "dpo of adapters": ("DPO", llama, preferences, dict(beta=0.5, adapters=True)),
    "reward": ("Reward", reward_model, preferences, dict(center_rewards_coefficient=0.1)),
}


def run(trainer_class, config_class, directory, case, **own):
    """Four steps and an evaluation: what is logged of each."""
    kind, model, data, options = CASES[case]
    adapters = options.get("adapters", False)
    options = {name: value for name, value in options.items() if name != "adapters"}
    extra = {"ref_model": llama()} if kind == "DPO" else {}
    if adapters:  # the reference of DPO is the model without them
        extra = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"], task_type="CAUSAL_LM")}
    arguments = config_class(
        **{
            "output_dir": directory,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "bf16": False,
            "pad_to_multiple_of": 8,  # TRL pads to 128 on a NeuronCore, and counts that among the tokens of packed rows
            "gradient_checkpointing": False,
            **options,
            **own,
        }
    )
    trainer = trainer_class(
        model=model(),
        args=arguments,
        train_dataset=data(),
        eval_dataset=data(8, 7),
        processing_class=tokenizer(),
        **extra,
    )
    trainer.train()
    metrics = [deterministic(log) for log in trainer.state.log_history if "loss" in log]
    # TRL's own metrics count rows that fill up a last batch of several ranks; the loss is that of the rows there are.
    return [metrics, deterministic(trainer.evaluate()), trainer.evaluate(data(5, 9))["eval_loss"]]


def on_ranks(rank, world_size, directory, cases, replicas):
    from optimum_trn.trainer import trl_trainers as neuron

    torch.manual_seed(rank)  # nobody promised equal generators
    results = {}
    for case in cases:
        kind = CASES[case][0]
        composed = type("Composed", (NeuronTrainerMixin, getattr(trl, f"{kind}Trainer")), {})
        own = dict(tensor_parallel_size=world_size // replicas)
        own |= dict(per_device_train_batch_size=4 // replicas, per_device_eval_batch_size=4 // replicas)
        results[case] = run(composed, getattr(neuron, f"Neuron{kind}Config"), f"{directory}/{case}", case, **own)
    return results


def compare(directory, cases, world_size, replicas, device="neuron"):
    ranks = run_ranks(on_ranks, world_size, str(directory), cases, replicas, device=device, timeout=300)
    for case in cases:
        kind = CASES[case][0]
        classes = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        expected = run(*classes, str(directory / "stock" / case), case, use_cpu=True)
        for rank, result in enumerate(ranks):
            assert_same(result[case], expected, f"{case}, rank {rank}")


def test_tp2_trains_on_completions_and_preferences_as_trl_does_in_one_process(tmp_path):
    compare(tmp_path, ["completion only", "dpo"], 2, 1)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (2, 2), (4, 2)], ids=["tp2", "dp2", "tp2 x dp2"])
def test_every_mesh_trains_as_trl_does_in_one_process(tmp_path, world_size, replicas):
    cases = [case for case in CASES if replicas == 1 or not case.startswith("packed")]  # these flatten their rows
    compare(tmp_path, cases, world_size, replicas)


def generated(rank, world_size, directory):
    """GRPO over data-parallel ranks, each with completions of its own."""
    from optimum_trn.trainer import NeuronTrainingArguments

    config = dataclass(type("Config", (trl.GRPOConfig, NeuronTrainingArguments), {}))
    composed = type("Composed", (NeuronTrainerMixin, trl.GRPOTrainer), {})
    options = dict(num_generations=4, max_completion_length=8, per_device_train_batch_size=4, max_steps=2)
    trainer = composed(
        model=llama(),
        reward_funcs=lambda completions, **kwargs: [float(len(set(text.split()))) for text in completions],
        args=config(output_dir=directory, bf16=False, logging_steps=1, save_strategy="no", report_to=[], **options),
        train_dataset=pairs().select_columns(["prompt"]),
        processing_class=tokenizer(),
    )
    before = trainer.model.lm_head.weight.detach().cpu().clone()
    trainer.train()
    metrics = [log for log in trainer.state.log_history if "loss" in log]
    assert len(metrics) == 2 and all(log["grad_norm"] > 0 for log in metrics)
    after = trainer.model.lm_head.weight.detach().cpu()
    assert not torch.equal(before, after)
    return [log["rewards/<lambda>/mean"] for log in metrics], after


@pytest.mark.full
def test_grpo_trains_data_parallel(tmp_path):
    (rewards, weight), (same_rewards, same_weight) = run_ranks(generated, 2, str(tmp_path / "out"))
    assert rewards == same_rewards and torch.equal(weight, same_weight)


def refused(rank, world_size, directory, kind, degrees, options):
    from optimum_trn.trainer import NeuronTrainingArguments

    config = dataclass(type("Config", (getattr(trl, f"{kind}Config"), NeuronTrainingArguments), {}))
    composed = type("Composed", (NeuronTrainerMixin, getattr(trl, f"{kind}Trainer")), {})
    rewards = {"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)} if kind == "GRPO" else {}
    with pytest.raises(PlanError) as error:
        composed(
            model=llama(),
            args=config(output_dir=directory, bf16=False, report_to=[], **degrees, **options),
            train_dataset=pairs() if kind != "DPO" else preferences(),
            processing_class=tokenizer(),
            **rewards,
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "degrees", "options", "reason"),
    [
        ("GRPO", dict(tensor_parallel_size=2), {}, "GRPOTrainer seeds every process by itself.*tensor_parallel_size=2"),
        ("GRPO", {}, dict(entropy_coef=0.1), "entropy of TRL's fused head is a metric and has no gradient"),
        ("SFT", dict(pipeline_parallel_size=2), {}, "pipeline_parallel_size=2 spreads over several"),
        ("SFT", dict(context_parallel_size=2), {}, "context_parallel_size=2 spreads over several"),
        ("DPO", dict(tensor_parallel_size=2), dict(precompute_ref_log_probs=True), "each rank has other shards"),
    ],
)
def test_what_trl_cannot_share_is_refused_by_name(tmp_path, kind, degrees, options, reason):
    for message in run_ranks(refused, 2, str(tmp_path), kind, degrees, options):
        assert re.search(reason, message), message


def random_logits(rank, world_size):
    mesh = ParallelConfig(tensor_parallel_size=world_size).build_mesh("cpu")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (40, 7), generator=generator).double()  # with ties
    target = torch.randint(7, (40,), generator=generator)
    target[::5] = -100
    padded = torch.cat([logits, torch.full((40, 1), 9.0, dtype=torch.float64)], 1)  # what reaches beyond the vocabulary
    local = padded.chunk(world_size, dim=1)[rank].contiguous().requires_grad_()
    sharded = token_statistics(local, target, 7, RankGroup(mesh.get_group("tp")))
    whole = logits.clone().requires_grad_()
    expected = token_statistics(whole, target, 7)
    weights = torch.linspace(-1, 1, 40).double()
    (sharded.log_probs * weights).sum().backward()
    (expected.log_probs * weights).sum().backward()
    assert torch.allclose(local.grad[:, : 7 - 4 * rank], whole.grad.split(4, 1)[rank][:, :4])
    for name, value in vars(expected).items():
        assert torch.allclose(getattr(sharded, name).double(), value.double()), name
    probabilities = logits.softmax(-1)
    seen = target != -100
    assert torch.allclose(expected.entropy[seen], torch.special.entr(probabilities).sum(-1)[seen])
    assert torch.allclose(expected.log_sum_sq_probs[seen], probabilities.square().sum(-1).log()[seen])
    assert torch.equal(expected.is_top1[seen], (logits.argmax(-1) == target)[seen]) and expected.is_top1.any()


def test_statistics_of_sharded_logits_are_those_of_whole_ones():
    run_ranks(random_logits, 2, device="cpu")
