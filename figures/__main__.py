"""python -m figures --results DIR --out DIR"""

import sys

from figures.io import exit_code
from figures.redraw import main

if __name__ == "__main__":
    sys.exit(exit_code(main))
