"""`liver doctor`: whether a cluster has what a run needs, one line a check."""
