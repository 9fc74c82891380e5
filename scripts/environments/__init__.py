"""Tandem's environments: their lock, how they are built, and how they are checked.

Standard library only: this package runs before any environment exists. An older Python than its modules are written for
comes as far as this file, and is told.
"""

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an older one can run this line, and should say so)
    sys.exit(
        f"{os.path.basename(sys.argv[0])} needs Python 3.11 or newer, and this is {sys.version.split()[0]}: "  # noqa: PTH119
        "run it with python3.11."
    )
