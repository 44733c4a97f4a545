"""Predicted memory: what is known to fit does, and each technique saves what it is for."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from optimum_trn.cost import get_machine
from optimum_trn.parallel import ParallelConfig
from optimum_trn.planning import Layout, Workload, architecture_of, estimate_memory

BERT_LARGE = architecture_of(
    AutoConfig.for_model(
        "bert", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=30522
    )
)
LLAMA = architecture_of(
    AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=11008,
        vocab_size=32000,
    )
)
TRN1 = get_machine("trn1.32xlarge")


@pytest.mark.parametrize(
    "length, precision, fits", [(128, "bf16_sr", 16), (128, "fp32", 8), (512, "bf16_sr", 2), (512, "fp32", 1)]
)
def test_the_micro_batches_of_bert_pretraining_fit_and_twice_them_do_not(length, precision, fits):
    work = Workload(BERT_LARGE, TRN1, 1, length, 32 * 32 * fits, precision)
    assert estimate_memory(work, Layout(ParallelConfig(zero_1=False), fits)).fits
    assert not estimate_memory(work, Layout(ParallelConfig(zero_1=False), 2 * fits)).fits


def test_full_fine_tuning_of_four_billion_parameters_does_not_fit_one_core_of_24_gib():
    config = AutoConfig.for_model(
        "qwen3", hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    shape = architecture_of(config)
    assert 3.9e9 < shape.parameters < 4.1e9
    for precision in ("autocast", "bf16_sr", "fp32"):
        work = Workload(shape, get_machine("trn2.48xlarge"), 1, 1024, 64, precision)
        assert not estimate_memory(work, Layout(ParallelConfig(zero_1=False, recompute="full"))).fits


def test_the_published_layout_of_llama_fits():
    work = Workload(LLAMA, TRN1, 16, 4096, 1024)
    assert estimate_memory(work, Layout(ParallelConfig(8, sequence_parallel=True, recompute="selective"))).fits
    assert not estimate_memory(work, Layout(ParallelConfig(8, sequence_parallel=True))).fits, "it would keep its scores"


def test_each_technique_saves_what_it_is_for():
    work = Workload(LLAMA, TRN1, 4, 2048, 256)

    def categories(**parallel):
        return estimate_memory(work, Layout(ParallelConfig(**parallel))).categories

    base = categories(tensor_parallel_size=8)
    assert categories(tensor_parallel_size=8, sequence_parallel=True)["activations"] < base["activations"]
    assert categories(tensor_parallel_size=8, recompute="full")["activations"] < base["activations"]
    assert categories(tensor_parallel_size=8, zero_1=False)["optimizer"] == pytest.approx(16 * base["optimizer"])
    assert categories(tensor_parallel_size=8, mics_partition_size=16)["weights"] == pytest.approx(base["weights"] / 16)
    pipeline = categories(tensor_parallel_size=8, pipeline_parallel_size=4)
    assert pipeline["weights"] < base["weights"] / 2
    gpipe = categories(tensor_parallel_size=8, pipeline_parallel_size=4, pipeline_schedule="gpipe")
    assert gpipe["activations"] > pipeline["activations"]


def test_flash_attention_keeps_no_scores():
    work = Workload(LLAMA, TRN1, 4, 2048, 256)
    layout = Layout(ParallelConfig(8))
    whole = estimate_memory(work, layout)
    tiles = estimate_memory(replace(work, flash_attention=True), layout)
    assert tiles.categories["activations"] < whole.categories["activations"]
