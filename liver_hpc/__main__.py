"""`python -m liver_hpc` is `liver`."""

import sys

from liver_hpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
