"""The state on disk: a world written at one step boundary, read into whatever layout comes next."""
