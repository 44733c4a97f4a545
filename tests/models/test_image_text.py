"""Image-text models are sharded tower by tower, and compute what their stock selves do, with images in the batch."""

import pytest
import torch
from safetensors.torch import load_file

from optimum_trn.errors import PlanError
from optimum_trn.modeling import NeuronModelForImageTextToText
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, plan_for, state_of, supported_models, unpatch_model
from optimum_trn.patching.registry import find_plan
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import families
from tests.models.image_text import (
    IMAGE_TEXT,
    configs_within,
    image_text_batch,
    image_text_class,
    image_text_config,
)
from tests.models.proof import proof

EXACT = 1e-9
SAMPLE = ["qwen2_vl", "llava", "mllama"]  # rotary positions in three axes; a CLIP tower; cross-attention to the image


def is_declared(model_type):
    return find_plan(image_text_config(model_type).get_text_config(decoder=True).model_type) is not None


def prove(model_type, size, device="cpu"):
    for result in run_ranks(proof, size, model_type, "image_text", size, device=device, environment=FLOAT64):
        assert result["error"] < EXACT, (model_type, result)
        assert not result["control"] <= 1e-4, f"{model_type}: a partial sum that was lost did not change any output"


@pytest.mark.parametrize("model_type", SAMPLE)
def test_an_image_text_model_equals_its_stock_self(model_type):
    prove(model_type, 2)


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(IMAGE_TEXT.keys() - set(SAMPLE)))
def test_every_image_text_model_equals_its_stock_self(model_type):
    if not is_declared(model_type):
        pytest.skip("its text has no declaration")
    prove(model_type, 2)


@pytest.mark.full
@pytest.mark.parametrize("size, device", [(3, "cpu"), (2, "neuron")])
@pytest.mark.parametrize(
    "model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "llava", "idefics3", "mistral3", "mllama"]
)
def test_towers_on_other_layouts(model_type, size, device):
    prove(model_type, size, device)


@pytest.mark.full
def test_every_tower_with_a_plan_is_in_a_model_that_is_proven():
    towers = {part.model_type for name in IMAGE_TEXT for part in configs_within(image_text_config(name))}
    assert set(supported_models()) - set(families()) <= towers
    assert sum(map(is_declared, IMAGE_TEXT)) >= 50


def answers(model, inputs):
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    prompt = {
        name: value[:1] if name in ("input_ids", "mm_token_type_ids") else value for name, value in inputs.items()
    }
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    prompt["pixel_values"], prompt["image_grid_thw"] = inputs["pixel_values"][:16], inputs["image_grid_thw"][:1]
    return model.generate(**prompt, **options).cpu()


def loaded(rank, world_size, directory):
    stock = image_text_class("qwen2_vl", torch.float32)
    model = NeuronModelForImageTextToText.from_pretrained(directory, ParallelConfig(world_size), dtype=torch.float32)
    assert type(model) is type(stock) and state_of(model).report.whole_towers == {}
    inputs = image_text_batch(stock)
    del inputs["labels"]
    here = {name: value.to(local_device()) for name, value in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(model(**here).logits.cpu(), stock(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(answers(model, here), answers(stock, inputs))
    model.save_pretrained(f"{directory}/again")
    unpatch_model(model)
    for name, tensor in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("neuron", marks=pytest.mark.full)])
def test_stock_files_are_loaded_answered_from_and_saved_again(tmp_path, device):
    image_text_class("qwen2_vl", torch.float32).save_pretrained(tmp_path)
    run_ranks(loaded, 2, str(tmp_path), device=device)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def reported(rank, world_size):
    report = patch_model(image_text_class("internvl", torch.float32), ParallelConfig(world_size))
    assert report.whole_towers == {"model.vision_tower": "internvl_vision"}
    assert "  whole on every rank: model.vision_tower (internvl_vision)" in str(report).splitlines()
    assert report.swapped["model.language_model.layers.1.mlp.down_proj"] == "RowWise"
    assert "vision_tower.encoder" not in str(report)
    with pytest.raises(PlanError, match="internvl: sequence_parallel=True is for decoders"):
        patch_model(image_text_class("internvl", torch.float32), ParallelConfig(world_size, sequence_parallel=True))


def test_a_tower_without_a_plan_stays_whole_and_is_listed():
    run_ranks(reported, 2, device="cpu")


def test_a_tower_that_is_too_small_is_refused_before_anything_is_cut():
    config = image_text_config("qwen2_vl")
    config.vision_config.num_heads = 2
    with pytest.raises(PlanError, match="qwen2_vl_vision: tensor_parallel_size 4 exceeds num_heads 2"):
        plan_for(config).validate(config, 4)
