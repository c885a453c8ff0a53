"""The worker: sockets, the partitions that it serves, and what clients ask."""
