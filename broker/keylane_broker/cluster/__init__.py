"""Which worker serves which partition, and how they agree on it."""
