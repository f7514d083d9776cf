"""PREPARE, TRANSFER, COMMIT and RELEASE, as a worker lives them."""
