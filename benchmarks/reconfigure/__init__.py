"""Lost time of a live handoff against stop, checkpoint, restart: same model, state and machine."""
