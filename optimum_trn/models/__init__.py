"""Model families, as declarations; importing this package fills the registry of plans."""

from optimum_trn.models import llama, qwen

__all__ = ["llama", "qwen"]
