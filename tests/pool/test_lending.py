"""Cores on loan: in turn, to the most urgent first, and back without a trace in the losses."""

import threading

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from optimum_trn import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.errors import StoreError
from optimum_trn.pool import PoolAddress, YieldCores, lease, lend
from optimum_trn.pool.lease_server import LeaseServer
from optimum_trn.pool.leases import AGING_SECONDS, Lease, LeaseTable
from optimum_trn.store import StoreClient
from optimum_trn.store.protocol import Operation
from tests.distributed import run_ranks
from tests.store.servers import TOKEN, running


@pytest.fixture
def address():
    with running(LeaseServer(2, TOKEN)) as server:
        yield PoolAddress((), TOKEN, (server.host, server.port))


def test_equal_jobs_take_turns_in_the_order_in_which_they_asked():
    table, order = LeaseTable(1), []
    leases = [Lease(f"job{index}", 1) for index in range(5)]
    for now, one in enumerate(leases):
        table.ask(one, now)
    for now in range(10, 15):
        (holder,) = table.held
        order.append(holder.job)
        table.release(holder, now)
    assert order == [f"job{index}" for index in range(5)] and table.free == [0]
    assert table.metrics["job4"].longest_wait == 13 - 4


def test_who_waits_for_many_cores_is_not_overtaken_by_who_needs_few():
    table = LeaseTable(4)
    first, large, small = Lease("first", 3), Lease("large", 4), Lease("small", 1)
    for now, one in enumerate((first, large, small)):
        table.ask(one, now)
    assert small.cores is None and large.cores is None
    table.release(first, 3)
    assert large.cores == (0, 1, 2, 3) and small.cores is None
    with pytest.raises(StoreError, match="asks for 5 cores, and 4"):
        table.ask(Lease("huge", 5), 4)


def test_a_more_urgent_job_asks_preemptible_ones_for_what_it_lacks_and_no_more():
    table = LeaseTable(3)
    low, lower, fixed = Lease("low", 1, 1, True), Lease("lower", 1, 0, True), Lease("fixed", 1, 0, False)
    for one in (low, lower, fixed):
        table.ask(one, 0)
    urgent = Lease("urgent", 1, 2)
    table.ask(urgent, 1)
    assert (low.wanted, lower.wanted, fixed.wanted) == (False, True, False)
    table.release(urgent, 2)  # changed its mind
    assert not lower.wanted
    table.ask(urgent, 3)
    table.release(lower, 4)
    assert urgent.cores == (1,) and table.metrics["lower"].preempted == 1


def test_waiting_raises_the_priority_so_that_nobody_starves():
    table = LeaseTable(1)
    holder, patient = Lease("holder", 1), Lease("patient", 1, 0)
    table.ask(holder, 0)
    table.ask(patient, 0)
    now = 0.0
    for index in range(1000):
        now += 1.0
        table.ask(Lease(f"urgent{index}", 1, 3), now)
        table.release(table.held[0], now)
        if patient.cores is not None:
            break
    assert patient.cores == (0,) and now <= 4 * AGING_SECONDS + 1


def test_a_lease_waits_its_turn_and_ends_with_its_connection(address):
    with lease(1, "a", address=address), lease(1, "b", address=address) as held:
        assert held.cores == (1,)
        with StoreClient(*address.scheduler, TOKEN) as client:
            client.ask(Operation.ASK, {"job": "c", "cores": 1, "priority": 0, "preemptible": False})
            assert client.ask(Operation.LEASE, {})["cores"] is None
            held.close()  # as if its process had been killed
            while client.ask(Operation.LEASE, {})["cores"] is None:
                pass
            said = client.ask(Operation.METRICS, {})
            assert said["jobs"]["c"]["granted"] == 1 and said["free"] == 0
    with pytest.raises(StoreError, match="1 ranks runs on 1 cores, not on 2"), lease(2, address=address):
        pass
    with pytest.raises(StoreError, match="lends no cores"), lease(1, address=PoolAddress((), TOKEN)):
        pass


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.values.append((logs["loss"], logs["grad_norm"]))


class EvaluationComes(TrainerCallback):
    """Another job asks for the core of this one after a step, uses it, and gives it back."""

    def __init__(self, address, step, cores):
        self.address, self.step, self.cores = address, step, cores
        self.thread, self.asked = None, threading.Event()
        self.freed, self.result = None, None

    def evaluate(self):
        with StoreClient(*self.address.scheduler, TOKEN) as client:
            client.ask(Operation.ASK, {"job": "evaluation", "cores": self.cores, "priority": 1, "preemptible": False})
            self.asked.set()
            while client.ask(Operation.LEASE, {})["cores"] is None:
                pass
            if hasattr(torch, "neuron"):
                self.freed = self.before - torch.neuron.memory_allocated()
                self.result = torch.ones(300, 300, device="neuron").sum().item()  # overwrites what is free

    def on_step_begin(self, args, state, control, **kwargs):
        if self.thread is None and state.global_step == self.step:
            self.before = torch.neuron.memory_allocated() if hasattr(torch, "neuron") else 0
            self.thread = threading.Thread(target=self.evaluate)
            self.thread.start()
            assert self.asked.wait(60)


def train(directory, callbacks, **arguments):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (24, 16))]
    losses = Losses()
    trainer = NeuronTrainer(
        model=model,
        args=NeuronTrainingArguments(
            output_dir=str(directory), max_steps=6, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            save_strategy="no", learning_rate=1e-2, disable_tqdm=True, **arguments,
        ),
        train_dataset=data,
        callbacks=[losses, *callbacks],
    )  # fmt: skip
    trainer.train()
    weights = {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()}
    return losses.values, weights


def test_training_that_is_preempted_has_the_losses_of_training_that_is_not(address, tmp_path):
    expected, weights = train(tmp_path, [])
    with lend(1, "other", address=address), lend(1, "training", preemptible=True, address=address) as held:
        yielding, evaluation = YieldCores(held), EvaluationComes(address, 3, cores=1)
        losses, after = train(tmp_path, [evaluation, yielding])
        evaluation.thread.join(60)
    assert losses == expected and len(losses) == 6  # dropout draws what it would have drawn
    assert len(yielding.switches) == 1
    for name, value in weights.items():
        assert torch.equal(after[name], value), name
    if evaluation.freed is not None:
        size = sum(value.numel() * value.element_size() for value in weights.values())
        assert evaluation.result == 90_000 and evaluation.freed > 2.5 * size  # the weights, and two states of each


def on_two_ranks(rank, world_size, address, directory):
    expected, _ = train(directory, [], tensor_parallel_size=2)
    with lend(2, "training", preemptible=True, address=address) as held:
        yielding = YieldCores(held)
        callbacks = [yielding]
        if rank == 0:
            callbacks.insert(0, EvaluationComes(address, 2, cores=2))
        losses, _ = train(directory, callbacks, tensor_parallel_size=2)
    with lease(2, address=address) as mesh:
        return losses == expected, len(yielding.switches), mesh.shape


@pytest.mark.full
def test_all_ranks_of_a_job_give_their_cores_back_together(address, tmp_path):
    for same, switches, shape in run_ranks(on_two_ranks, 2, address, str(tmp_path)):
        assert same and switches == 1 and shape == (2,)
