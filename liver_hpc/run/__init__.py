"""The run as a pure core: what is decided, what is known, and what lies in its directory."""
