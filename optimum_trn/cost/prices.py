"""What an instance costs an hour: list prices, each with region, date and source; a caller may give another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """Dollars an hour for one instance, on demand unless `source` says otherwise."""

    dollars_per_hour: float
    region: str
    date: str
    source: str

    def __str__(self) -> str:
        return f"${self.dollars_per_hour:g} an hour, {self.region}, {self.date} ({self.source})"


PRICES: dict[str, Price] = {
    "trn1.2xlarge": Price(1.34, "region not stated", "2023-03-21", "aws-neuron-sdk, trn1_instance_prices.csv"),
    "trn1.32xlarge": Price(21.50, "region not stated", "2023-03-21", "aws-neuron-sdk, trn1_instance_prices.csv"),
    "trn1n.32xlarge": Price(
        24.78, "region not stated", "date not stated", "Hugging Face, optimum-neuron tutorials/fine_tune_llama_7b"
    ),
    "trn2.48xlarge": Price(
        38.43, "us-west-2", "date not stated", "a third-party price table, not AWS: check before you rent"
    ),
    "p4d.24xlarge": Price(32.77, "us-east-1", "before June 2025", "list price before the cut of June 2025"),
}
"""Of trn3 no price is published."""


def get_price(instance: str, dollars_per_hour: float | None = None) -> Price | None:
    """The price of an instance, or None where none is known; `dollars_per_hour` of the caller comes first."""
    if dollars_per_hour is not None:
        return Price(dollars_per_hour, "any", "now", "given by the caller")
    return PRICES.get(instance.removesuffix("-lnc1"))
