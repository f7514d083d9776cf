"""Whether handoffs change what is learned: a run with many of them against a fixed one."""
