"""Pure layout arithmetic: who owns which box of which tensor, and what has to move."""
