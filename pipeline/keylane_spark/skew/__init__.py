"""Hot keys and partitions, and what to do about them."""
