"""`optimum-trn cache` lists, shows and removes graphs; `precompile` fills the cache for the next run."""

import json
import os
import subprocess
import sys
import time

import pytest

from optimum_trn.cli import main
from optimum_trn.device.compile_cache import CachedGraph, CompileCache

SCRIPT = """
import torch

import optimum_trn


def train(rows):
    model = torch.nn.Linear(8, 1).to("neuron")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in rows:
        model(torch.randn(size, 8).to("neuron")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train((4, 4, 3))
"""


@pytest.fixture
def cache(tmp_path):
    found = CompileCache(str(tmp_path))
    for number in (1, 2):
        found.add(CachedGraph(f"MODULE_{number}+aa", 10, 9.0, number, f"cause {number}", "train.py", time.time()))
    return found


def test_graphs_are_listed_shown_and_removed(cache, capsys):
    main(["cache", "list", "--url", cache.url, "--json"])
    assert [graph["cause"] for graph in json.loads(capsys.readouterr().out)] == ["cause 1", "cause 2"]
    main(["cache", "list", "--url", cache.url])
    text = capsys.readouterr().out
    assert "2 graphs" in text and "estimated to compile in 18 s" in text.replace("\n", " ")
    main(["cache", "show", "MODULE_2", "--url", cache.url])
    assert "cause 2" in capsys.readouterr().out
    main(["cache", "clean", "--url", cache.url])
    assert "2 graphs removed" in capsys.readouterr().out and cache.graphs() == []


def test_a_name_that_is_not_one_graphs_is_a_mistake_in_one_line(cache, capsys):
    with pytest.raises(SystemExit):
        main(["cache", "show", "MODULE_", "--url", cache.url])
    assert "2 graphs in" in capsys.readouterr().err


def test_without_a_cache_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--no_cache")
    with pytest.raises(SystemExit):
        main(["cache", "list"])
    assert "--no_cache" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["precompile", "no_such_script.py"])
    assert "no_such_script.py is no file" in capsys.readouterr().err


@pytest.mark.full
def test_the_second_run_of_a_script_compiles_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"), "NEURON_CC_FLAGS": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "optimum_trn.cli", "precompile", "--json", str(script)]

    def run():
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])["compilations"]

    first, second = run(), run()
    assert not any(compilation["cached"] for compilation in first)
    assert all(compilation["cached"] for compilation in second) and len(first) == len(second)
    assert any("(4, 8) became (3, 8) at step 3" in c["cause"] and "script.py:11" in c["cause"] for c in first)
