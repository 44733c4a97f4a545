"""Real pretrained weights: SmolLM2-135M-Instruct, whose 9 heads and 3 key-value heads two cores do not divide."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from examples.convert_gguf import convert, smollm2_file
from optimum_trn.errors import PlanError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from tests.distributed import run_ranks

PROMPT = "What is the capital of France?"
TEXTS = [
    "Tensor parallelism cuts every weight matrix of a layer over several cores, which then exchange activations.",
    "A checkpoint that was interrupted while it was written must not be mistaken for a complete one: rename it last.",
]
STEPS = 5


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A stock directory with the real weights."""
    try:
        gguf = smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(f"no real weights: {error}")
    directory = tmp_path_factory.mktemp("smollm2")
    convert(gguf, directory)
    yield directory
    for file in directory.iterdir():  # half a gigabyte, which pytest would keep for three sessions
        file.unlink()


def inputs(directory):
    """Token ids of a chat prompt, and a padded training batch."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return dict(prompt), dict(batch)


def generate_and_train(model, directory):
    """Greedy tokens, and the losses of some steps of a plain training loop."""
    batch = {name: tensor.to(model.device) for name, tensor in inputs(directory)[1].items()}
    tokens = generate(model, directory)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tokens, losses


def generate(model, directory):
    """Greedy tokens after the prompt."""
    prompt = {name: tensor.to(model.device) for name, tensor in inputs(directory)[0].items()}
    return model.eval().generate(**prompt, max_new_tokens=12, do_sample=False).cpu().tolist()


def on_ranks(rank, world_size, directory, saved):
    model = NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(world_size))
    results = generate_and_train(model, directory)
    model.save_pretrained(saved)
    return results


def refused(rank, world_size, directory):
    with pytest.raises(PlanError) as error:
        NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(world_size))
    return str(error.value)


@pytest.mark.parametrize("cores", [2, pytest.param(3, marks=pytest.mark.full)])
def test_cores_generate_train_and_save_what_stock_transformers_does(cores, smollm2, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained(smollm2)
    tokens, losses = generate_and_train(stock, smollm2)
    assert "Paris" in AutoTokenizer.from_pretrained(smollm2).decode(tokens[0])
    assert losses[-1] < losses[0]
    saved = tmp_path / "saved"
    for sharded_tokens, sharded_losses in run_ranks(on_ranks, cores, str(smollm2), str(saved), timeout=300):
        assert sharded_tokens == tokens
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(sharded_losses, losses, strict=True)), (
            sharded_losses,
            losses,
        )

    trained = AutoModelForCausalLM.from_pretrained(saved)
    assert generate(trained, smollm2) == generate(stock, smollm2)
    (saved / "model.safetensors").unlink()


def test_more_cores_than_heads_are_refused_with_the_numbers_before_anything_is_read(tmp_path):
    LlamaConfig(num_attention_heads=1, num_key_value_heads=1).save_pretrained(tmp_path)
    for text in run_ranks(refused, 2, str(tmp_path)):
        assert "num_attention_heads 1" in text and "up to 1" in text and "\n" not in text


def test_the_converted_directory_says_nothing_of_quantisation(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config and "_name_or_path" not in config
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert not hasattr(model, "hf_quantizer") and not hasattr(model, "is_quantized")
    assert model.dtype is torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
