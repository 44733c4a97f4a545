"""What hardware takes for an operator and for a collective, in seconds, and what it costs: arithmetic without torch."""

from optimum_trn.cost.calibration import CALIBRATION, FITTED, Calibration
from optimum_trn.cost.cores import MACHINES, Machine, get_machine
from optimum_trn.cost.prices import PRICES, Price, get_price

__all__ = ["CALIBRATION", "FITTED", "MACHINES", "PRICES", "Calibration", "Machine", "Price", "get_machine", "get_price"]
