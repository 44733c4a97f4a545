"""Every test of the device runs with the device installed."""

import optimum_trn  # noqa: F401
