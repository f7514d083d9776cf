"""A page that follows a run: its journal is read as it grows, and a browser is told what is new."""
