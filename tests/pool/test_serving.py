"""Many models on few cores: every request is answered, in order, by the model that it asked for."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from optimum_trn.errors import StoreError
from optimum_trn.pool import Dispatcher, put_directory
from optimum_trn.pool.worker import Worker, WorkerServer
from tests.store.servers import TOKEN, running

from .pools import a_pool
from .test_client import vanish

IDS = torch.arange(8).reshape(1, 8)


@pytest.fixture
def models(tmp_path):
    """Six models, in a pool, and what each answers."""
    with a_pool(2) as pool:
        expected = {}
        for index in range(6):
            torch.manual_seed(index)
            model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)).eval()
            model.save_pretrained(tmp_path / f"m{index}")
            put_directory(pool, tmp_path / f"m{index}", f"m{index}")
            with torch.no_grad():
                expected[f"m{index}"] = model(IDS).logits
        yield pool, expected


@pytest.mark.full
def test_fifty_alternating_requests_over_six_models_on_two_cores_are_answered_in_order(models):
    pool, expected = models
    with running(WorkerServer(Worker(pool, 2), TOKEN)) as one, running(WorkerServer(Worker(pool, 2), TOKEN)) as two:
        with Dispatcher([(one.host, one.port), (two.host, two.port)], TOKEN, capacity=2) as dispatcher:
            names = [f"m{number % 6}" for number in range(50)]
            results = [dispatcher.submit(name, input_ids=IDS) for name in names]
            for name, result in zip(names, results, strict=True):
                torch.testing.assert_close(result.result(120), expected[name], rtol=1e-4, atol=1e-5)
            for order in dispatcher.order:
                assert order == sorted(order) and len(order) >= 20  # of each core, and both were used alike
            assert sorted(sum(dispatcher.order, [])) == list(range(50))
            assert {name: said.requests for name, said in dispatcher.metrics.items()} == {
                f"m{index}": 9 if index < 2 else 8 for index in range(6)
            }
            with pytest.raises(StoreError, match="no model other"):
                dispatcher.submit("other", input_ids=IDS).result(60)
            with pytest.raises(StoreError, match="Error"):
                dispatcher.submit("m0", input_ids=IDS + 1000).result(60)
            torch.testing.assert_close(dispatcher.submit("m0", input_ids=IDS).result(60), expected["m0"])


def test_requests_of_a_worker_that_is_gone_are_answered_by_another(models):
    pool, expected = models
    with running(WorkerServer(Worker(pool, 2), TOKEN)) as one, running(WorkerServer(Worker(pool, 2), TOKEN)) as two:
        with Dispatcher([(one.host, one.port), (two.host, two.port)], TOKEN, capacity=2, timeout=30) as dispatcher:
            dispatcher.submit("m0", input_ids=IDS).result(60)
            vanish(one)
            results = [(f"m{n % 6}", dispatcher.submit(f"m{n % 6}", input_ids=IDS)) for n in range(12)]
            for name, result in results:
                torch.testing.assert_close(result.result(120), expected[name], rtol=1e-4, atol=1e-5)
