"""What a NeuronCore has not is refused by name, with the way out."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def tiny():
    return LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, eos_token_id=1
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.uint16, torch.uint32, torch.uint64])
def test_types(dtype):
    for make in (
        lambda: torch.ones(2, dtype=dtype, device="neuron"),
        lambda: torch.ones(2, dtype=dtype).to("neuron"),
        lambda: torch.ones(2, device="neuron").to(dtype),
    ):
        with pytest.raises(TypeError, match="NeuronCores have no .* type. Convert to a supported one"):
            make()


def test_quantized_tensors():
    x = torch.ones(2, 2)
    for make in (
        lambda: torch.quantize_per_tensor(x.to("neuron"), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).to("neuron"),
        lambda: torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8, device="neuron"),
    ):
        with pytest.raises(TypeError, match="no quantized tensor types .* Keep weights in bfloat16"):
            make()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention(implementation):
    with pytest.raises(ValueError, match="kernel for CUDA devices.*attn_implementation='sdpa'"):
        AutoModelForCausalLM.from_config(tiny(), attn_implementation=implementation)


def test_quantized_checkpoints(tmp_path):
    LlamaForCausalLM(tiny()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Quantized weights \(bitsandbytes\) .* unquantized checkpoint in bfloat16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
