"""The report's drawings, by matplotlib: the same for the page and for files of their own."""
