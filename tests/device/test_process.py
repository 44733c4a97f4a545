"""What a process does to the device: starting, forking, threads, ending."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

import optimum_trn  # noqa: F401


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_scripts_that_end_right_after_backward_exit_with_zero():
    # Ten ends of a process: each child imports nothing again, so this takes seconds.
    done = script(
        """
        import os, sys, torch, optimum_trn
        optimum_trn.device.build.load_extension()
        codes = []
        for number in range(10):
            child = os.fork()
            if child == 0:
                model = torch.nn.Linear(64, 64).to("neuron")
                model(torch.randn(8, 64, device="neuron")).sum().backward()
                sys.exit(0)  # a full interpreter shutdown, with tensors alive
            codes.append(os.waitpid(child, 0)[1])
        assert codes == [0] * 10, codes
        """
    )
    assert done.returncode == 0, done.stderr


def test_backward_runs_on_the_calling_thread():
    seen = []
    x = torch.ones(3, device="neuron", requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(threading.get_ident()))
    y.sum().backward()
    assert seen == [threading.get_ident()]

    def elsewhere() -> None:
        z = torch.ones(3, device="neuron", requires_grad=True) * 2
        z.register_hook(lambda g: seen.append(threading.get_ident()))
        z.sum().backward()
        seen.append(threading.get_ident())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[1] == seen[2] != seen[0]


def test_every_thread_starts_on_the_core_of_its_process():
    devices = []
    thread = threading.Thread(target=lambda: devices.append(torch.ones(1, device="neuron").device))
    thread.start()
    thread.join()
    assert devices == [torch.ones(1, device="neuron").device]


def test_threads_allocate_and_free_at_once():
    errors = []

    def work(seed: int) -> None:
        try:
            for step in range(100):
                x = torch.full((seed * 100 + step + 1,), float(seed), device="neuron")
                if (x + x).sum().item() != 2.0 * seed * x.numel():
                    errors.append((seed, step))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_child_forked_after_first_use_gets_the_error_of_the_hardware():
    done = script(
        """
        import os, sys, torch, optimum_trn
        x = torch.ones(3, device="neuron")
        text = "Cannot re-initialize Neuron runtime in forked subprocess. To use Neuron with multiprocessing, "
        text += "use the 'spawn' start method"
        def fails(f):
            try:
                f()
            except RuntimeError as error:
                return text in str(error)
            return False
        child = os.fork()
        if child == 0:
            ways = [lambda: x.add_(1), lambda: torch.ones(2, device="neuron"), lambda: x.cpu()]
            ways += [lambda: torch.neuron.set_device(0), lambda: x.resize_(99999)]
            ok = all(map(fails, ways))
            ok = ok and torch.ones(2).sum().item() == 2  # the host still computes
            del x
            sys.exit(0 if ok else 3)
        assert os.waitpid(child, 0)[1] == 0
        assert x.tolist() == [1.0, 1.0, 1.0]
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_child_forked_before_first_use_works():
    done = script(
        """
        import os, sys, torch, optimum_trn
        child = os.fork()
        if child == 0:
            assert torch.ones(3, device="neuron").sum().item() == 3
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert done.returncode == 0, done.stderr


def test_data_loader_workers_may_fork_after_first_use():
    x = torch.ones(3, device="neuron")
    loader = torch.utils.data.DataLoader(
        list(range(8)), batch_size=2, num_workers=2, multiprocessing_context=multiprocessing.get_context("fork")
    )
    assert torch.cat(list(loader)).tolist() == list(range(8))
    assert x.sum().item() == 3


def test_nothing_is_left_behind_after_kill():
    before = set(os.listdir("/dev/shm"))
    done = script(
        """
        import os, signal, torch, optimum_trn
        x = torch.ones(1000, 1000, device="neuron")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.returncode == -9
    assert set(os.listdir("/dev/shm")) - before == set()


@pytest.mark.parametrize("model", ["llama", pytest.param("gelu", marks=pytest.mark.full)])
def test_training_under_malloc_check(model):
    done = script(
        f"""
        import torch, optimum_trn
        sizes = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        if "{model}" == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM
            model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes))
        else:
            from transformers import BertConfig, BertForMaskedLM
            model = BertForMaskedLM(BertConfig(**sizes))
        model = model.to("neuron", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.randint(0, 256, (4, 32), device="neuron")
        losses = []
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], losses
        """,
        MALLOC_CHECK_="3",
        GLIBC_TUNABLES="glibc.malloc.check=3",
        LD_PRELOAD="libc_malloc_debug.so.0",
    )
    assert done.returncode == 0, done.stderr


def test_streams_and_events_are_immediate():
    stream = torch.neuron.Stream()
    start, end = torch.Event(device="neuron", enable_timing=True), torch.Event(device="neuron", enable_timing=True)
    start.record()
    with torch.neuron.stream(stream):
        assert torch.neuron.current_stream() == stream
        y = torch.ones(3, device="neuron") * 2
        end.record()
    assert torch.neuron.current_stream() != stream
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0 and stream.query()
    stream.wait_event(start)
    torch.accelerator.synchronize()
    assert y.sum().item() == 6


def test_tied_parameters_stay_tied_and_the_same_objects():
    model = nn.Module()
    model.a, model.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.b.weight = model.a.weight
    before = model.a.weight
    model.to("neuron")
    assert model.a.weight is model.b.weight is before and before.device.type == "neuron"
