"""Redis and nothing else: keys, scripts, connections, and what they promise."""
