"""`python -m forethought` is the command `forethought`."""

import sys

from forethought.cli import main

if __name__ == "__main__":
    sys.exit(main())
