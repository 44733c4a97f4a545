"""pytest plugin: what a test imports from transformers as Trainer and TrainingArguments is this package's."""

import sys

import optimum_trn

NAMES = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")


def pytest_configure(config):
    """Replace them, and make sure of it: the table would compare the stock Trainer with itself."""
    ours = {name: getattr(optimum_trn, f"Neuron{name}") for name in NAMES}
    # Only now: importing the Trainer puts another module in the place of what `import transformers` has bound before.
    vars(sys.modules["transformers"]).update(ours)
    from transformers import Trainer

    if Trainer is not optimum_trn.NeuronTrainer:
        raise RuntimeError(f"transformers.Trainer is still {Trainer}, not NeuronTrainer.")


def pytest_report_header(config):
    """Say whose Trainer is tested."""
    return f"Trainer: {sys.modules['transformers'].Trainer.__qualname__}"
