"""A worker's part of a handoff: PREPARE, TRANSFER, COMMIT and RELEASE."""
