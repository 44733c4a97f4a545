"""The traced step predicts what a core really needs: its peak memory, and the operations of its matrix products."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model
from optimum_trn.planning import trace_training_step
from tests.distributed import run_ranks

BATCH_SIZE, SEQUENCE_LENGTH = 2, 64
CONFIG = dict(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4096,
)


def measured_peak(rank, world_size):
    """The peak of the second training step on this rank's simulated core, in bytes above what was there before."""
    torch.neuron.empty_cache()
    before = torch.neuron.memory_allocated()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, use_cache=False))
    patch_model(model, ParallelConfig(tensor_parallel_size=world_size))
    model.to("neuron")
    tokens = torch.zeros(BATCH_SIZE, SEQUENCE_LENGTH, dtype=torch.long, device="neuron")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        torch.neuron.reset_peak_memory_stats()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.neuron.max_memory_allocated() - before


@pytest.mark.parametrize("size", [1, 2])
def test_the_traced_peak_is_the_measured_one(size):
    traced = trace_training_step(
        LlamaConfig(**CONFIG),
        ParallelConfig(tensor_parallel_size=size),
        batch_size=BATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
    )
    for measured in run_ranks(measured_peak, size):
        assert traced.peak_hbm_bytes == pytest.approx(measured, rel=0.02)
    assert sum(traced.memory_bytes.values()) == pytest.approx(traced.peak_hbm_bytes, rel=1e-6)


def test_the_traced_operations_are_those_of_the_matrix_products_shared_by_the_ranks():
    config = LlamaConfig(**CONFIG)
    head_dim = config.hidden_size // config.num_attention_heads
    kv_width = config.num_key_value_heads * head_dim
    layer = (
        2 * config.hidden_size**2
        + 2 * config.hidden_size * kv_width
        + 3 * config.hidden_size * config.intermediate_size
    )
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    tokens = BATCH_SIZE * SEQUENCE_LENGTH
    # Two products forward; backward two for each and one to recompute the scores (Dao et al. 2022, arXiv:2205.14135).
    attention = (2 + 5) * 2 * BATCH_SIZE * SEQUENCE_LENGTH**2 * config.hidden_size * config.num_hidden_layers
    for size in (1, 2, 4):
        traced = trace_training_step(
            config, ParallelConfig(tensor_parallel_size=size), batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH
        )
        assert traced.flops == (6 * weights * tokens + attention) // size


def test_a_trace_fails_where_training_would():
    with pytest.raises(PlanError, match="exceeds num_attention_heads 8"):
        trace_training_step(
            LlamaConfig(**CONFIG), ParallelConfig(tensor_parallel_size=9), batch_size=1, sequence_length=8
        )
    assert not dist.is_initialized()


def trace_inside(rank, world_size):
    with pytest.raises(MeshError, match="a process of its own"):
        trace_training_step(LlamaConfig(**CONFIG), ParallelConfig(), batch_size=1, sequence_length=8)


def test_a_trace_inside_a_real_process_group_is_refused():
    run_ranks(trace_inside, 2)


def test_every_rank_needs_the_same_where_heads_and_columns_are_filled_up():
    config = LlamaConfig(
        **{**CONFIG, "num_hidden_layers": 1, "num_key_value_heads": 2, "intermediate_size": 351, "vocab_size": 997}
    )
    traces = [
        trace_training_step(
            config, ParallelConfig(4, sequence_parallel=True), batch_size=1, sequence_length=30, rank=rank
        )
        for rank in (0, 3)
    ]
    assert traces[0] == traces[1]
