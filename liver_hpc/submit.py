"""`python -m liver_hpc.submit --config run.yaml` is `liver submit --config run.yaml`."""

import sys

from liver_hpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["submit", *sys.argv[1:]]))
