"""Entry point by which `import torch` installs the simulated device for scripts that never import optimum_trn.

It is a module of its own so that a process that doesn't ask for it (OPTIMUM_TRN_AUTOLOAD=1) never imports the package.
"""

import os


def autoload() -> None:
    """Install the simulated device if OPTIMUM_TRN_AUTOLOAD=1 is set; called by torch at the end of its import."""
    if os.environ.get("OPTIMUM_TRN_AUTOLOAD") == "1":
        import optimum_trn  # noqa: F401
