"""What we rely on inside torch, transformers and accelerate is as it was when the code was written."""

import json

import pytest

from tests.pinned_signatures import PINNED, describe, resolve, signature, signatures

COMMAND = "python -m tests.pinned_signatures"


def test_no_signature_that_we_rely_on_has_moved():
    now, pinned = signatures(), json.loads(PINNED.read_text())
    gone = sorted(name for name, found in now.items() if found == "gone")
    assert not gone, f"{gone} can't be found (any more): find what took their place, or add their owner to OWNERS"
    moved = [
        f"{name}: {pinned[name]} -> {now[name]}" for name in pinned.keys() & now.keys() if pinned[name] != now[name]
    ]
    assert not moved, "\n".join([f"check that our code fits, then run `{COMMAND}`:", *moved])
    assert pinned.keys() == now.keys(), f"{sorted(pinned.keys() ^ now.keys())} came or went: run `{COMMAND}`"


@pytest.mark.parametrize(
    "name, rests_on",
    [
        ("transformers.trainer.Trainer._save", "an override"),
        ("transformers.PreTrainedModel:_load_pretrained_model", "a private method"),
        ("torch.nn.Module:_forward_pre_hooks", "a private attribute of instances"),
        ("transformers.trainer.OPTIMIZER_NAME", "an import"),
        ("torch._tensor_str.tensor_totype", "a name in a string"),
    ],
)
def test_the_names_are_read_off_the_sources(name, rests_on):
    assert name in json.loads(PINNED.read_text()), f"{rests_on} is not noticed"


def test_a_changed_parameter_changes_the_signature_and_an_annotation_does_not():
    assert describe(lambda a, b=1: 0) != describe(lambda a, b=2: 0) != describe(lambda a: 0)

    def annotated(a: int, b: str = "x") -> None: ...

    def bare(a, b="x"): ...

    assert describe(annotated) == describe(bare) == "(a, b='x')"


def test_a_name_that_is_gone_does_not_resolve():
    with pytest.raises(AttributeError):
        resolve("transformers.Trainer._there_is_no_such_method")
    with pytest.raises(AttributeError):
        signature("transformers.Trainer:_there_is_no_such_attribute")
