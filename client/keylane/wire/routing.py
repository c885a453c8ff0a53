"""Where things go: the partition of a key, and the address of a worker."""

import zlib

PORT = 9999


def partition_of(key: str, partitions: int) -> int:
    """Return the partition of a key: CRC-32 (as in zlib and PNG) of its UTF-8 bytes, modulo the count.

    Every client language has it, and it will not change: a key's order depends on it.

        >>> [partition_of(key, 8) for key in ("a", "customer-7", "Zürich")]
        [3, 0, 6]
    """
    return zlib.crc32(key.encode()) % partitions


def address_of(host: str, port: int) -> str:
    """`host:port`, the host in brackets if it has colons of its own.

    >>> address_of("::1", 9999)
    '[::1]:9999'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
