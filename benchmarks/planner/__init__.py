"""How long one worker takes to plan its part of a handoff, from 64 to 65,536 workers."""
