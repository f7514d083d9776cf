"""How torchft's lighthouse is set; the defaults wait longer."""

JOIN_TIMEOUT_MS = 100
TICK_MS = 50
HEARTBEAT_TIMEOUT_MS = 1000
