"""The report as one self-contained page: drawings in SVG, tables, nothing loaded from outside."""
