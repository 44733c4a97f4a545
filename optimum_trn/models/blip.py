"""BLIP's text decoder: BERT's layers, which attend to the image."""

from dataclasses import replace

from optimum_trn.models.bert import ATTENTION, CROSS_ATTENTION, FEED_FORWARD
from optimum_trn.patching import ModelPlan, Stack, Where, register_plan

register_plan(
    ModelPlan(
        "blip_text_model",
        embedding="embeddings.word_embeddings",
        stacks=(
            Stack(
                "encoder.layer",
                replace(ATTENTION, attributes=("all_head_size",)),
                Where(replace(CROSS_ATTENTION, attributes=("all_head_size",))),
                FEED_FORWARD,
            ),
        ),
    )
)
