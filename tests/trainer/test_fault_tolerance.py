"""A process that comes to be the first of those that survived does what the first one did."""

from transformers import ProgressCallback
from transformers.trainer_callback import TrainerState

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer import scenario


def becomes_first(rank, world_size, directory):
    args = NeuronTrainingArguments(output_dir=directory, report_to=[], disable_tqdm=False)
    trainer = NeuronTrainer(model=scenario.llama(), args=args, train_dataset=scenario.rows(4))
    trainer.state = TrainerState(max_steps=3)
    trainer._take_position(1)
    trainer.callback_handler.on_train_begin(args, trainer.state, trainer.control)
    trainer._take_position(0)
    trainer.state.global_step = 2
    trainer.callback_handler.on_step_end(args, trainer.state, trainer.control)
    (progress,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]
    return trainer.is_world_process_zero(), progress.training_bar.n


def test_its_progress_bar_begins_where_the_training_is(tmp_path):
    assert run_ranks(becomes_first, 1, str(tmp_path), device="cpu") == [(True, 2)]
