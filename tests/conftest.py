"""What every test starts with: no state of accelerate that another one left."""

import os

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# Graphs of tests are nobody's to reuse; tests of the cache name one of their own.
os.environ.setdefault("NEURON_CC_FLAGS", "--no_cache")
