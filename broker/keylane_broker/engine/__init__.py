"""Every operation on topics, partitions and subscriptions, each one script."""
