"""python -m reference_kernels.compiling"""

import sys

from .command import main

sys.exit(main())
