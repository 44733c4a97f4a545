"""transformers on the device beside training: pipelines, generation with dynamic and static caches, loading."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    bos_token_id=0,
    eos_token_id=1,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", bos_token="w0", pad_token="w1")


def test_a_pipeline_runs_on_the_device(model, tokenizer):
    texts = {}
    for device in ("cpu", "neuron"):
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
        assert generate.device.type == device and generate.model.device.type == device
        texts[device] = generate("w5 w6 w7", max_new_tokens=8, do_sample=False, min_new_tokens=8)[0]["generated_text"]
    assert texts["neuron"] == texts["cpu"] and len(texts["cpu"].split()) >= 8


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_equals_the_cpu(model, cache):
    """With a static cache transformers compiles the decoding step by the backend's name."""
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    expected = model.to("cpu").generate(prompt, **options)
    options["attention_mask"] = options["attention_mask"].to("neuron")
    compiled = torch._dynamo.utils.counters["aot_autograd"]["ok"]
    seen = model.to("neuron").generate(prompt.to("neuron"), cache_implementation=cache, **options)
    assert torch.equal(seen.cpu(), expected)
    assert (torch._dynamo.utils.counters["aot_autograd"]["ok"] > compiled) == (cache == "static")
    torch._dynamo.reset()


def test_sampling_follows_the_devices_seed(model):
    prompt = torch.tensor([[5, 6, 7]], device="neuron")
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(model.to("neuron").generate(prompt, max_new_tokens=12, do_sample=True, min_new_tokens=12))
    assert torch.equal(*drawn)


def test_loading_straight_onto_the_device(model, tmp_path):
    model.to("cpu").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="neuron")
    assert {parameter.device.type for parameter in loaded.parameters()} == {"neuron"}
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
