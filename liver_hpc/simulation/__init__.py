"""Handoffs of worlds that no machine here could hold: the same planner, placement, policy and
state machine, in simulated time. Pure: no torch, no I/O."""
