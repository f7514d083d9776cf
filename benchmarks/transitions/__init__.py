"""State on its way between layouts on every axis, bit for bit, and the training that goes on."""
