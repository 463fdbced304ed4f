"""python -m specter_core generate …"""

import sys

from specter_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
