"""One folder a claim: `python -m benchmarks.NAME --json FILE` measures it. Nothing imports them."""
