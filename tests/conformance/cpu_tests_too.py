"""pytest plugin: accelerate's tests for hosts without an accelerator run as well; nothing in them needs the CPU.

accelerate means to save time with `require_cpu`: schedulers, say, do the same anywhere.
"""

from typing import TypeVar

import accelerate.test_utils
import accelerate.test_utils.testing

T = TypeVar("T")


def require_cpu(test_case: T) -> T:
    """Runs the test anywhere."""
    return test_case


for module in (accelerate.test_utils, accelerate.test_utils.testing):
    module.require_cpu = require_cpu
