"""Sizes read off a config are those of the model that transformers builds from it."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForPreTraining

from optimum_trn.errors import UnsupportedModelError
from optimum_trn.planning import architecture_of

TYPES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gpt2",
    "gpt_neox",
    "opt",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "olmo2",
]


@pytest.mark.parametrize("model_type", TYPES)
def test_every_parameter_is_counted(model_type):
    config = AutoConfig.for_model(model_type, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert architecture_of(config).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)


def test_pretraining_heads_of_bert_count():
    config = BertConfig(num_hidden_layers=2)
    with torch.device("meta"):
        model = BertForPreTraining(config)
    found = architecture_of(config)
    assert found.masked and not found.decoder
    assert found.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-6)


def test_flops_are_those_of_aws_for_a_model_of_twelve_squares():
    config = AutoConfig.for_model("gpt2", n_embd=1024, n_layer=24, n_head=16)
    expected = 12 * 24 * 1024 * 512 * (6 * 1024 + 512)  # aws-neuron-samples, extract_mfu
    assert architecture_of(config).model_flops(512) == expected


@pytest.mark.parametrize(
    "model_type, fields, head",
    [
        ("t5", {}, "AutoModelForSeq2SeqLM"),
        ("t5", {"num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"}, "AutoModelForSeq2SeqLM"),
        ("bart", {"decoder_layers": 6}, "AutoModelForSeq2SeqLM"),
        ("vit", {"num_labels": 10}, "AutoModelForImageClassification"),
        ("deepseek_v3", {"num_hidden_layers": 5, "n_routed_experts": 8}, "AutoModelForCausalLM"),
    ],
)
def test_encoder_decoders_latent_attention_and_vision_are_counted_too(model_type, fields, head):
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = getattr(transformers, head).from_config(config)
    assert architecture_of(config).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=2e-3)


@pytest.mark.parametrize("model_type", ["whisper", "clip"])
def test_models_of_speech_and_of_several_modes_are_refused_by_name(model_type):
    with pytest.raises(UnsupportedModelError, match=model_type):
        architecture_of(AutoConfig.for_model(model_type))
