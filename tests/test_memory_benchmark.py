"""The memory of a training step: theory orders the layouts, the kept table follows it, and so does a small model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import BELOW, LAYOUTS, NATIVE, failures
from benchmarks.memory_model import SIZES, closed_form, parameters_of

ROOT = Path(__file__).resolve().parent.parent


def fullest(sizes, name):
    return max(peak.total for peak in closed_form(SIZES[sizes], LAYOUTS[name]))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("less", "more"), BELOW)
def test_theory_orders_the_layouts(sizes, less, more):
    assert fullest(sizes, less) < fullest(sizes, more)


def test_the_closed_form_counts_the_parameters_of_a_stock_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES["tiny"]
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
    )
    stock = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    assert parameters_of(sizes, sizes.layers, 2, 1) == stock


def test_the_kept_table_has_every_layout_and_no_failure():
    rows = json.loads((ROOT / "docs" / "memory.json").read_text())
    assert set(rows) == {*LAYOUTS, NATIVE}
    assert failures(rows) == []
    wasteful = {
        **rows,
        "TP2": {**rows["TP2"], "measured": [3 * value for value in rows["TP2"]["measured"]], "off": [2.0]},
    }
    assert len(failures(wasteful)) == 2  # above one core's closed form, and above its own


@pytest.mark.full
def test_measured_memory_of_a_small_model_has_the_order_of_theory(tmp_path):
    command = [sys.executable, "benchmarks/memory.py", "--sizes", "tiny", "--docs", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert (tmp_path / "memory.json").exists(), run.stdout + run.stderr
    wrong = failures(json.loads((tmp_path / "memory.json").read_text()))
    assert [text for text in wrong if "closed form" not in text] == []
