"""`python -m liver_hpc` is `liver`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory: see submit.py
    from liver_hpc.cli.main import main

    sys.exit(main())
