"""Predicted steps: the published rows, and what must hold whatever the constants are."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from benchmarks.published import ROWS, compare, main, parse, ratios_of, read
from optimum_trn.cost import CALIBRATION, get_machine
from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.planning import Layout, Workload, architecture_of, estimate_step

ROWS_OF_FILE = read(ROWS)["rows"]
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
WORK = Workload(LLAMA, get_machine("trn1.32xlarge"), nodes=4, sequence_length=2048, global_batch=256)


def seconds(micro_batch=1, **parallel):
    work = {name: parallel.pop(name) for name in ("machine", "nodes", "precision") if name in parallel}
    return estimate_step(replace(WORK, **work), Layout(ParallelConfig(**parallel), micro_batch)).seconds


def test_published_rows_are_predicted():
    result = compare([parse(row) for row in ROWS_OF_FILE])
    assert result["error"]["median"] <= 0.06 and result["error"]["worst"] <= 0.12
    assert result["error"]["median"] * 1.5 <= result["constant_mfu_error_bf16"]["median"]


def test_published_scaling_is_predicted_within_three_points():
    for ratio in ratios_of(read(ROWS)):
        assert abs(ratio.predicted(CALIBRATION["trainium"]) - ratio.published) <= 0.03, ratio.id


def test_any_file_of_rows_can_be_judged(tmp_path, capsys):
    import yaml

    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump(ROWS_OF_FILE[:2]))
    main(["--rows", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("B1") and lines[-1].startswith("median error")
    main(["--rows", str(file), "--json"])
    assert '"predicted"' in capsys.readouterr().out
    file.write_text(yaml.safe_dump([{**ROWS_OF_FILE[0], "precision": "int4"}]))
    with pytest.raises(SystemExit):
        main(["--rows", str(file)])
    assert "B1" in capsys.readouterr().err


def test_the_parts_of_a_step_add_up_to_it():
    step = estimate_step(WORK, Layout(ParallelConfig(8, sequence_parallel=True, pipeline_parallel_size=4)))
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert all(value >= 0 for value in step.parts.values())
    assert sum(step.layers_per_stage) == 32
    assert 0 < step.mfu < 1


def test_more_of_the_machine_takes_less_time():
    base = seconds(tensor_parallel_size=8)
    assert seconds(tensor_parallel_size=8, nodes=8) < base
    assert seconds(tensor_parallel_size=8, machine=get_machine("trn2.48xlarge")) < base
    assert seconds(tensor_parallel_size=8, machine=get_machine("trn1n.32xlarge")) < base


def test_more_work_takes_more_time():
    base = seconds(tensor_parallel_size=8)
    assert seconds(tensor_parallel_size=8, precision="fp32") > base
    assert seconds(tensor_parallel_size=8, recompute="full") > seconds(tensor_parallel_size=8, recompute=0.5) > base
    assert (
        base
        < seconds(tensor_parallel_size=8, recompute="selective")
        < seconds(tensor_parallel_size=8, recompute="full")
    )


def test_interleaving_shortens_the_bubble_and_sequence_parallelism_the_norms():
    layout = dict(tensor_parallel_size=8, pipeline_parallel_size=4)
    parts = {
        name: estimate_step(WORK, Layout(ParallelConfig(**layout, pipeline_schedule=name))).parts["pipeline bubble"]
        for name in ("1f1b", "interleaved_1f1b")
    }
    assert 0 < parts["interleaved_1f1b"] < parts["1f1b"]
    assert seconds(**layout, sequence_parallel=True) < seconds(**layout)


def test_a_layout_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(MeshError, match="128"):
        seconds(tensor_parallel_size=3)
    with pytest.raises(PlanError, match="256 sequences"):
        seconds(tensor_parallel_size=8, micro_batch=3)
    with pytest.raises(PlanError, match="precision"):
        replace(WORK, precision="fp8")


def test_flash_attention_takes_less_of_memory_and_matrix_engine():
    layout = Layout(ParallelConfig(8))
    whole, tiles = (estimate_step(replace(WORK, flash_attention=flash), layout).engines for flash in (False, True))
    assert tiles.memory < whole.memory and tiles.matrix < whole.matrix
