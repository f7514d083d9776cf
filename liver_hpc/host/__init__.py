"""This machine: its processes, files and network interfaces."""
