"""Batches of few shapes: padded to a bucket's length and a full batch's rows, so that no step meets a new shape.

Neuron compiles one graph per shape (github.com/aws-neuron/aws-neuron-sdk, file
frameworks/torch/pytorch-native-overview.rst, 2026-08-21). Padding is masked and its labels are ignored: the loss is
that of the batch as it was. Where that can't be known the batch stays as it is, and the log says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.nn import functional

from .evaluation import IGNORE_INDEX

POWERS_OF_TWO = "powers_of_two"
SHORTEST = 16  # of the powers of two
TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
ROW_LOSSES = ("ForSequenceClassification", "ForImageClassification")
ENCODER_INPUTS = ("attention_mask", "token_type_ids")
DECODER_INPUTS = ("decoder_input_ids", "decoder_attention_mask")


def parsed(text: str) -> tuple[int, ...]:
    """The lengths that an argument names, ascending; none for the powers of two. Raises ValueError for other text."""
    if text == POWERS_OF_TWO:
        return ()
    lengths = text.split(",")
    if not all(length.strip().isdecimal() and int(length) > 0 for length in lengths):
        raise ValueError(
            f"static_shapes={text!r} names no lengths: give a number of tokens such as 512, several with commas "
            f"between them, or {POWERS_OF_TWO}."
        )
    return tuple(sorted(map(int, lengths)))


@dataclass(frozen=True)
class Padding:
    """How batches are padded: to `lengths` in tokens, or to powers of two that are at most `longest` if it is empty."""

    lengths: tuple[int, ...] = ()
    pad_token_id: int = 0
    longest: int | None = None
    pads_rows: bool = True
    has_decoder: bool = False
    by_token: bool = True  # whether what the model gives has a place for every token, or one for every row

    def length_for(self, length: int) -> int:
        """The bucket of a batch of `length` tokens: that length where there is none."""
        if not self.lengths:
            bucket = max(1 << (length - 1).bit_length(), SHORTEST)
            return max(min(bucket, self.longest or bucket), length)
        return next((bucket for bucket in self.lengths if bucket >= length), length)

    def pad(self, batch: Mapping[str, Any], rows: int) -> dict[str, Any] | None:
        """The batch with its tokens up to the next bucket and its rows up to `rows`; None if it can't be padded.

        Rows that are added repeat the first, so that no row is without a token to attend to; their labels are ignored.
        It is padded on the host: on the device every length would need a graph of its own to pad it.
        """
        if not self._understands(batch):
            return None
        padded = {name: tensor.cpu() for name, tensor in batch.items()}
        if "input_ids" in padded:
            padded.setdefault("attention_mask", torch.ones_like(padded["input_ids"]))
            self._lengthen(padded, ("input_ids", *ENCODER_INPUTS, *(() if self.has_decoder else ("labels",))))
        if self.has_decoder:
            self._lengthen(padded, ("labels", *DECODER_INPUTS))
        missing = max(rows - rows_of(batch), 0) if self.pads_rows else 0
        for name, tensor in padded.items():
            more = tensor[:1].expand(missing, *tensor.shape[1:])
            padded[name] = torch.cat([tensor, torch.full_like(more, IGNORE_INDEX) if name == "labels" else more])
        return {name: tensor.to(next(iter(batch.values())).device) for name, tensor in padded.items()}

    def cut_back(self, outputs: Any, batch: Mapping[str, Any], padded: Mapping[str, Any]) -> Any:
        """What a model gave for `padded`, for the rows and tokens of `batch` alone."""

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim > 0 and tensor.shape[0] == rows_of(padded):
                tensor = tensor[: rows_of(batch)]
            if self.by_token and tensor.ndim > 1 and tensor.shape[1] == padded["input_ids"].shape[1]:
                tensor = tensor[:, : batch["input_ids"].shape[1]]
            return tensor

        return outputs if outputs is None else recursively_apply(cut, outputs)

    def _lengthen(self, padded: dict[str, Tensor], names: tuple[str, ...]) -> None:
        """Pad the second dimension of those that have one."""
        fills = {"input_ids": self.pad_token_id, "decoder_input_ids": self.pad_token_id, "labels": IGNORE_INDEX}
        for name in names:
            if name in padded and padded[name].ndim == 2:
                length = padded[name].shape[1]
                padded[name] = functional.pad(
                    padded[name], (0, self.length_for(length) - length), value=fills.get(name, 0)
                )

    def _understands(self, batch: Mapping[str, Any]) -> bool:
        """Whether each entry is one that this class knows how to pad."""
        if not batch or not all(isinstance(value, Tensor) and value.ndim > 0 for value in batch.values()):
            return False
        labels, tokens = batch.get("labels"), batch.get("input_ids")
        if labels is not None and (labels.is_floating_point() or labels.dtype is torch.bool):
            return False
        others = batch.keys() - {"labels", "input_ids", *ENCODER_INPUTS, *(DECODER_INPUTS if self.has_decoder else ())}
        if tokens is None:  # images, whose rows alone are padded
            return others == {"pixel_values"} and not self.by_token and (labels is None or labels.ndim == 1)
        if others or tokens.ndim != 2 or not tokens.numel():
            return False
        if any(name in batch and batch[name].shape != tokens.shape for name in ENCODER_INPUTS):
            return False
        if labels is None:
            return not self.has_decoder
        if self.has_decoder:
            return labels.ndim == 2 and all(
                batch[name].shape == labels.shape for name in DECODER_INPUTS if name in batch
            )
        return labels.shape == tokens.shape if self.by_token else labels.ndim == 1


def rows_of(batch: Mapping[str, Tensor]) -> int:
    """The rows of a batch."""
    return len(next(iter(batch.values())))


@dataclass
class PadToBuckets:
    """A collator that pads what another collates, for loops of one's own: the `collate_fn` of a DataLoader.

    `rows`: the batch size, up to which a last batch that is short is filled; 0 leaves its rows. Raises ValueError for a
    batch that it does not know how to pad: one whose labels are no classes, or with entries that no text model takes.
    """

    collator: Callable[[list[Any]], Mapping[str, Any]]
    padding: Padding = field(default_factory=Padding)
    rows: int = 0

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """Collate, then pad."""
        batch = self.collator(features)
        padded = self.padding.pad(batch, self.rows)
        if padded is None:
            shapes = {name: tuple(getattr(value, "shape", ())) for name, value in batch.items()}
            raise ValueError(
                f"A batch of {shapes} can't be padded without changing its loss: padding is for input_ids of two "
                "dimensions, their masks, and labels that are classes. Pad it in your own collator."
            )
        return padded


def why_not(model: Any, args: Any, computes_own_loss: bool) -> str | None:
    """Why batches for this model keep their shapes; None if padding is known to leave its loss alone."""
    config = getattr(model, "config", None)
    loss = loss_type(model)
    if computes_own_loss:
        return "a loss of your own may count padding; pad in the collator (pad_to_multiple_of) if it does not"
    if config is None or loss not in (*TOKEN_LOSSES, *ROW_LOSSES):
        return f"whether the loss of {type(model).__name__} leaves out padding is not known"
    if loss in ROW_LOSSES and (
        config.num_labels == 1 or config.problem_type not in (None, "single_label_classification")
    ):
        return "its loss is a mean over rows, none of which can be left out"
    if loss != "ForImageClassification" and "attention_mask" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no attention_mask"
    if loss == "ForSequenceClassification" and getattr(config.get_text_config(), "pad_token_id", None) is None:
        return "the configuration has no pad_token_id, by which the model finds the last token"
    if getattr(config, "output_router_logits", False):
        return "the auxiliary loss of the router would count padding"
    rope = str(getattr(config.get_text_config(), "rope_parameters", None))
    if "dynamic" in rope or "longrope" in rope:
        return "its rotary position embeddings depend on the length of the batch"
    if args.neftune_noise_alpha:
        return "the noise of NEFTune depends on the length of the batch"
    if getattr(args, "context_parallel_size", 1) > 1:
        return "context_parallel_size shares out the tokens as they are"
    return None


def loss_type(model: Any) -> str | None:
    """transformers' name of the loss; its generative models that are not named ForCausalLM have that one, too."""
    named: str | None = getattr(model, "loss_type", None)
    return "ForCausalLM" if named is None and type(model).__name__.endswith("LMHeadModel") else named


def padding_for(model: Any, lengths: tuple[int, ...]) -> Padding:
    """The padding of a model of which `why_not` has nothing to say."""
    config = model.config.get_text_config()  # those of images have no tokens
    pad_token_id = getattr(config, "pad_token_id", None)
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return Padding(
        lengths,
        pad_token_id=pad_token_id if isinstance(pad_token_id, int) and pad_token_id >= 0 else 0,
        longest=getattr(config, "max_position_embeddings", None),
        pads_rows=not normalised,  # whose statistics would count the rows that are repeated
        has_decoder=bool(getattr(model.config, "is_encoder_decoder", False)),
        by_token=loss_type(model) in TOKEN_LOSSES,
    )
