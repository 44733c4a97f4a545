"""Saving while training goes on, on disks that fill up, to URLs, in processes that are killed: nothing is lost."""

import os
import random
import resource
import signal
from pathlib import Path

import fsspec
import pytest

from optimum_trn.errors import CheckpointError
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer import scenario

STEPS = 6


class Watched(NeuronTrainer):
    """Calls `on_saving` with itself whenever a checkpoint is begun."""

    on_saving = staticmethod(lambda trainer: None)

    def _save_checkpoint(self, model, trial):
        self.on_saving(self)
        super()._save_checkpoint(model, trial)


def trainer(directory, trainer_class=NeuronTrainer, **options):
    arguments = NeuronTrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_steps": 1,
            "save_total_limit": 2,
            "disable_tqdm": True,
            "report_to": [],
            **options,
        }
    )
    model = scenario.llama(attention_dropout=0.2)
    return trainer_class(model=model, args=arguments, train_dataset=scenario.rows(24))


def losses(run):
    return [log["loss"] for log in run.state.log_history if "grad_norm" in log]


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def both_ways(rank, world_size, directory, options):
    whole = trainer(Path(directory, "blocking"), **options)
    whole.train()
    beside = trainer(Path(directory, "async"), async_save=True, **options)
    beside.train()
    resumed = trainer(Path(directory, "async"), async_save=True, max_steps=STEPS + 1, **options)
    resumed.train(resume_from_checkpoint=True)
    return losses(whole), losses(beside), losses(resumed)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, dict(tensor_parallel_size=2)),
        pytest.param(1, dict(), marks=pytest.mark.full),
        pytest.param(2, dict(), marks=pytest.mark.full),
        pytest.param(2, dict(pipeline_parallel_size=2), marks=pytest.mark.full),
        pytest.param(2, dict(mics_partition_size=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_is_saved_while_training_goes_on_is_what_a_blocking_save_writes(tmp_path, world_size, options):
    for blocking, beside, resumed in run_ranks(both_ways, world_size, str(tmp_path), options):
        assert beside == blocking
        assert resumed[:STEPS] == blocking and len(resumed) == STEPS + 1
    assert names(tmp_path / "blocking") == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]
    assert names(tmp_path / "async") == [f"checkpoint-{STEPS}", f"checkpoint-{STEPS + 1}"]
    one, other = tmp_path / "blocking" / f"checkpoint-{STEPS}", tmp_path / "async" / f"checkpoint-{STEPS}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        if (one / name).exists() and (other / name).exists():
            assert (one / name).read_bytes() == (other / name).read_bytes()


def on_a_full_disk(rank, world_size, directory, asynchronous):
    """The second save fails on rank 1, which may write no file beyond a few kilobytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(Watched):
        @staticmethod
        def on_saving(trainer):
            if rank == 1 and trainer.state.global_step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    run = trainer(directory, Full, tensor_parallel_size=2, async_save=asynchronous)
    try:
        with pytest.raises(CheckpointError) as caught:
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resumed = trainer(directory, tensor_parallel_size=2)
    resumed.train(resume_from_checkpoint=True)
    return str(caught.value), losses(resumed)


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_one_before_is_resumed(tmp_path, asynchronous):
    answers = run_ranks(on_a_full_disk, 2, str(tmp_path), asynchronous)
    for text, resumed in answers:
        assert "checkpoint-2 could not be saved" in text and "too large" in text
        assert len(resumed) == STEPS
    assert names(tmp_path) == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]


class Scored(NeuronTrainer):
    """Evaluates every epoch, and finds its models worse from one to the next."""

    def __init__(self, **options):
        scores = iter([2.0, 1.0])
        super().__init__(eval_dataset=scenario.rows(4), compute_metrics=lambda _: {"score": next(scores)}, **options)


def best_found_after_its_save(rank, world_size, directory, options):
    epochs = dict(max_steps=-1, num_train_epochs=2, per_device_train_batch_size=12, save_total_limit=1)
    best = dict(eval_strategy="epoch", metric_for_best_model="score", greater_is_better=True)
    run = trainer(directory, Scored, **epochs, **best, **options)
    run.train()
    return run.state.best_global_step, run.state.best_model_checkpoint


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_checkpoint_that_turns_out_best_after_it_was_saved_is_kept(tmp_path, asynchronous):
    options = dict(tensor_parallel_size=2, async_save=asynchronous)
    for answer in run_ranks(best_found_after_its_save, 2, str(tmp_path), options):
        assert answer == (2, str(tmp_path / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-2"]


SMALL_FILES = ["config.json", "training_args.bin", "rng_state_1.pth", "trainer_state.json", "checkpoint.json.tmp"]


class OnADevice(NeuronTrainer):
    """Finds the file `full` of a checkpoint to be on a device that is full: what is written there fails with ENOSPC."""

    full = "model.safetensors"

    def _save(self, output_dir=None, state_dict=None):
        if self._saving is not None and self.args.should_save and self.full:
            os.makedirs(output_dir, exist_ok=True)
            Path(output_dir, self.full).symlink_to("/dev/full")
        super()._save(output_dir, state_dict)


def with_full_files(rank, world_size, directory, options, files):
    run = trainer(directory, OnADevice, **{**options, "save_steps": STEPS})
    run.full = None
    run.train()
    texts = []
    for name in files:
        run.full = name
        run.state.global_step = STEPS + 1
        with pytest.raises(CheckpointError) as caught:
            run._save_checkpoint(run.model, None)
            run.finish_saving()
        texts.append(str(caught.value))
    run.full = None
    run._save_checkpoint(run.model, None)
    run.finish_saving()
    return texts


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (
            dict(tensor_parallel_size=2),
            ["model.safetensors", "optimizer.safetensors", "scheduler.pt", *SMALL_FILES],
        ),
        (dict(zero_1=False), ["optimizer.pt", "scheduler.pt", *SMALL_FILES]),
        pytest.param(
            dict(tensor_parallel_size=2, async_save=True),
            ["model.safetensors", "optimizer.safetensors", "scheduler.pt", *SMALL_FILES],
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_whatever_file_finds_the_disk_full_all_ranks_say_so_and_the_next_save_is_complete(tmp_path, options, files):
    for texts in run_ranks(with_full_files, 2, str(tmp_path), options, files):
        for name, text in zip(files, texts, strict=True):
            assert f"checkpoint-{STEPS + 1} could not be saved" in text, f"{name}: {text}"
            # torch.save does not say why: where it failed, the free bytes do.
            assert "No space left on device" in text or "bytes are free there" in text, f"{name}: {text}"
    assert names(tmp_path) == [f"checkpoint-{STEPS}", f"checkpoint-{STEPS + 1}"]


def uninterrupted(rank, world_size, directory, options):
    run = trainer(directory, tensor_parallel_size=2, **{**options, "save_strategy": "no"})
    run.train()
    return losses(run)


def killed(rank, world_size, directory, options, step, seconds):
    """Dies `seconds` after it has begun to save this step, or later in training that does not end by itself."""

    class Doomed(Watched):
        @staticmethod
        def on_saving(trainer):
            if trainer.state.global_step == step:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, as SIGKILL does
                signal.setitimer(signal.ITIMER_REAL, seconds[rank])

    endless = trainer(directory, Doomed, tensor_parallel_size=2, **{**options, "max_steps": 10_000})
    try:
        endless.train()
    except Exception:  # the other rank has died first
        os.kill(os.getpid(), signal.SIGKILL)


def continued(rank, world_size, directory, options):
    run = trainer(directory, tensor_parallel_size=2, **options)
    run.train(resume_from_checkpoint=True)
    return losses(run)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of a run that nobody kills."""
    return run_ranks(uninterrupted, 2, str(tmp_path_factory.mktemp("whole")), ENDS)


ENDS = dict(max_steps=STEPS + 4, lr_scheduler_type="constant")
SAVE_SECONDS = 0.2  # about what saving takes; the timer of a rank that is earlier or later hits training, or the next


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "asynchronous"),
    [(seed, asynchronous) for asynchronous in (False, True) for seed in range(20)],
)
def test_a_run_that_is_killed_while_it_saves_continues_exactly(tmp_path, expected, seed, asynchronous):
    options = dict(async_save=asynchronous, **ENDS)
    draw = random.Random(seed)
    # From the third save on a first one is complete: the second began when it was.
    step, seconds = draw.randint(3, 4), [draw.uniform(0.001, SAVE_SECONDS) for _ in range(2)]
    run_ranks(killed, 2, str(tmp_path / "killed"), options, step, seconds, may_die=[0, 1])
    left = [path for path in (tmp_path / "killed").iterdir() if path.name.startswith("checkpoint-")]
    assert all((path / "checkpoint.json").exists() for path in left)
    assert run_ranks(continued, 2, str(tmp_path / "killed"), options) == expected
    assert names(tmp_path / "killed") == [f"checkpoint-{STEPS + 4}", f"checkpoint-{STEPS + 3}"]


def test_an_output_directory_may_be_a_url_of_fsspec(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUM_TRN_OUTPUTS", str(tmp_path / "local"))
    whole = trainer("memory://bucket/run", use_cpu=True)
    whole.train()
    whole.save_model()
    remote = fsspec.filesystem("memory")
    assert [path.rsplit("/")[-1] for path in sorted(remote.ls("/bucket/run", detail=False)) if remote.isdir(path)] == [
        f"checkpoint-{STEPS - 1}",
        f"checkpoint-{STEPS}",
    ]
    assert remote.exists("/bucket/run/model.safetensors")
    monkeypatch.setenv("OPTIMUM_TRN_OUTPUTS", str(tmp_path / "another host"))
    remote.rm(f"/bucket/run/checkpoint-{STEPS}/checkpoint.json")  # as if the upload had been interrupted
    resumed = trainer("memory://bucket/run", use_cpu=True)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    by_name = trainer("file://" + str(tmp_path / "here"), use_cpu=True, max_steps=STEPS + 1)
    by_name.train(resume_from_checkpoint=f"memory://bucket/run/checkpoint-{STEPS - 1}")
    assert losses(by_name)[:STEPS] == losses(whole)
    assert names(tmp_path / "here") == [f"checkpoint-{STEPS}", f"checkpoint-{STEPS + 1}"]
