"""`optimum-trn plan` prints a plan that can be pasted, as text and as JSON, and a user's mistake in one line."""

import json

import pytest

from optimum_trn.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1376,
    "vocab_size": 32000,
}


@pytest.fixture
def command(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return ["plan", str(file), "--instance", "trn1.2xlarge", "--seq-len", "512", "--global-batch", "32"]


def test_the_plan_has_time_cost_reasons_and_arguments(command, capsys):
    main([*command, "--layout", "tp=2,mb=1", "--tokens", "2B", "--budget", "1", "--compare", "p4d.24xlarge"])
    text = capsys.readouterr().out
    for part in (
        "Predicted by a cost model, not measured",
        "NeuronTrainingArguments(tensor_parallel_size=2",
        "$1.34 an hour, region not stated, 2023-03-21",
        "2,000,000,000 tokens:",
        "Budget of 1 dollars: over by",
        "the others fell:",
        "predicted speed:",
        "prices alone save",
    ):
        assert part in text, part


def test_states_in_the_host_take_no_hbm_and_the_plan_says_what_it_leaves_out(command, capsys):
    main([*command, "--layout", "tp=1,mb=1,offload"])
    text = " ".join(capsys.readouterr().out.split())
    assert "optimizer_offload=True" in text and "The time of a step leaves out what they take" in text
    hbm = text[text.index("HBM of the fullest core") : text.index("Optimizer states in the memory of each host")]
    assert "weights" in hbm and "optimizer" not in hbm


def test_json_is_one_object_that_says_it_is_a_prediction(command, capsys):
    main([*command, "--json", "--price", "1.0"])
    found = json.loads(capsys.readouterr().out)
    assert "not a measurement" in found["kind"]
    assert found["price"]["dollars_per_hour"] == 1.0
    assert found["chosen"]["layout"] == found["best"][0]["layout"]
    assert sum(found["rejected"].values()) + len(found["best"]) == found["layouts_tried"]


def test_a_mistake_is_one_line(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--layout", "tp=4"])
    assert stop.value.code == 2
    assert "no valid layout of 2 ranks" in capsys.readouterr().err


def test_a_report_and_a_trace_are_written_on_request(command, tmp_path, capsys):
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    main([*command, "--report", str(page), "--trace", str(trace), "--top", "2"])
    text = page.read_text()
    for part in ('id="hbm"', 'id="step"', 'id="layouts"', 'id="scaling"', "Predicted by a cost model"):
        assert part in text, part
    assert text.count("<tr") > 20  # the page lists more layouts than the terminal
    engines = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"matrix", "vector", "DMA"} <= engines
    with pytest.raises(SystemExit):
        main([*command, "--report", str(tmp_path / "no" / "plan.html")])
