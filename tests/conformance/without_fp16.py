"""Runs accelerate's test script where fp16 counts as unavailable, so that what comes after its fp16 section runs too.

accelerate answers `is_fp16_available()` with yes for every device but one, and `Accelerator(mixed_precision="fp16")`
then refuses `neuron` by name: on this device, and on the hardware.
"""

import runpy
import sys

import accelerate.utils
import accelerate.utils.imports

if __name__ == "__main__":
    for module in (accelerate.utils.imports, accelerate.utils):
        module.is_fp16_available = lambda: False
    runpy.run_module(sys.argv[1], run_name="__main__")
