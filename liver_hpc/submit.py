"""`python -m liver_hpc.submit --config run.yaml` is `liver submit --config run.yaml`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # For -m Python puts the current directory first: a file that happens to be called queue.py
        # would be run in the place of the library's. So it goes before anything else is imported.
        del sys.path[0]
    from liver_hpc.cli.main import main

    sys.exit(main(["submit", *sys.argv[1:]]))
