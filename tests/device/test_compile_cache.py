"""The compile cache has the layout and the hashes of Neuron's, is written whole or not at all, and opens any URL."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from optimum_trn.device import compile_cache
from optimum_trn.device.compile_cache import CachedGraph, CompileCache, cache_url, compiler_flags, module_name


def graph(module="MODULE_1+d41d8cd9"):
    return CachedGraph(module, 15, 10.0, 1, "it is the first graph", "train.py", time.time())


def test_an_entry_lies_where_neuron_puts_it(tmp_path):
    cache = CompileCache(str(tmp_path))
    assert cache.add(graph()) and graph().module in cache
    (compiler,) = tmp_path.glob("neuronxcc-*")
    assert compiler.name == f"neuronxcc-{compile_cache.compiler_version()}" and compiler.name.endswith("+simulated")
    assert {file.name for file in (compiler / "MODULE_1+d41d8cd9").iterdir()} == {
        "model.done",
        "graph.json",
        "compile_flags.json",
    }


def test_the_hash_of_the_flags_is_neurons(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "")
    assert module_name(b"", "trn1").endswith("+e30acd3a"), "as entries for trn1 in the public cache of Neuron models"
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=transformer")
    assert not module_name(b"", "trn1").endswith("+e30acd3a")


def test_flags_about_the_cache_are_no_part_of_a_key(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1 --cache_dir=/a --retry_failed_compilation --cache_dir /b")
    assert compiler_flags() == ["-O1"]


@pytest.mark.parametrize(
    ("flags", "variable", "url"),
    [
        ("", None, "/var/tmp/neuron-compile-cache"),
        ("", "s3://bucket/graphs", "s3://bucket/graphs"),
        ("--cache_dir=/a", "/b", "/a"),
        ("--cache_dir /a", "/b", "/a"),
        ("--no_cache", "/b", None),
    ],
)
def test_the_cache_is_found_as_neuron_finds_it(monkeypatch, flags, variable, url):
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL", raising=False)
    if variable:
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", variable)
    assert cache_url() == url


def test_half_an_entry_is_none_and_is_written_again(tmp_path):
    cache = CompileCache(str(tmp_path))
    cache.add(graph())
    (done,) = tmp_path.glob("*/MODULE_*/model.done")
    done.unlink()
    assert graph().module not in cache and cache.graphs() == []
    assert cache.add(graph()) and len(cache.graphs()) == 1


def test_a_url_of_fsspec_is_a_cache():
    cache = CompileCache("memory://graphs")
    assert cache.add(graph()) and not cache.add(graph())
    assert [entry.module for entry in cache.graphs()] == [graph().module]
    assert cache.clean() == 1 and cache.graphs() == []


def test_a_url_that_cannot_be_opened_says_what_to_do():
    with pytest.raises(ValueError, match="no-such-protocol.*NEURON_COMPILE_CACHE_URL.*--no_cache"):
        CompileCache("no-such-protocol://graphs")


def test_cleaning_leaves_what_a_real_compiler_has_put_there(tmp_path):
    real = tmp_path / "neuronxcc-2.21.0.0+abcd" / "MODULE_1+d41d8cd9"
    real.mkdir(parents=True)
    (real / "model.neff").write_text("")
    cache = CompileCache(str(tmp_path))
    cache.add(graph())
    assert cache.clean() == 1
    assert (real / "model.neff").exists() and cache.graphs() == []


def test_writers_of_the_same_graphs_write_each_of_them_once(tmp_path):
    modules = [f"MODULE_{number}+d41d8cd9" for number in range(20)]

    def add_all(_):
        cache = CompileCache(str(tmp_path))
        return [module for module in modules if cache.add(graph(module))]

    with ThreadPoolExecutor(3) as writers:
        written = sum(writers.map(add_all, range(3)), [])
    assert sorted(written) == sorted(modules)
    for file in tmp_path.glob("*/MODULE_*/graph.json"):
        assert json.loads(file.read_text())["operations"] == 15
    assert not list(tmp_path.glob("*/.unfinished-*"))
