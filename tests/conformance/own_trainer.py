"""pytest plugin: what a test imports from transformers as Trainer and TrainingArguments is this package's."""

import sys

import optimum_trn

NAMES = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")


def pytest_configure(config):
    """Replace them when all plugins are loaded, and make sure of it: the table would compare the stock Trainer twice."""
    # Not what `import transformers` binds above: where it is what loads torch, which loads this package (autoload),
    # that is the module that transformers replaces by its lazy one at the end of its own import.
    module = sys.modules["transformers"]
    for name in NAMES:
        setattr(module, name, getattr(optimum_trn, f"Neuron{name}"))
    from transformers import Trainer

    if Trainer is not optimum_trn.NeuronTrainer:
        raise RuntimeError(f"transformers.Trainer is still {Trainer}, not NeuronTrainer.")


def pytest_report_header(config):
    """Say whose Trainer is tested."""
    return f"Trainer: {sys.modules['transformers'].Trainer.__qualname__}"
