"""Redis as the payload store and the broker's store both need it: its URLs, connections and errors."""

SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "redis+sentinel")
