"""The way to the workers: addresses, connections, and who serves what."""
