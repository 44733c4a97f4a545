"""The torch.compile backend `neuron`."""


def register() -> None:
    """placeholder"""
