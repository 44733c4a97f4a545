"""Streams of the simulated core are names: work is finished when an operator returns."""

import torch

import optimum_trn  # noqa: F401


def test_record_stream_is_accepted():
    tensor = torch.ones(3, device="neuron")
    tensor.record_stream(torch.Stream(device="neuron"))
    assert tensor.tolist() == [1, 1, 1]
