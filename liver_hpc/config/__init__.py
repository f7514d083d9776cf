"""YAML run files -> validated, frozen run descriptions."""
