"""How many files a worker may open: each connection is one, and what a system allows at first is few."""

import logging
import resource

__all__ = ["allow_connections"]

log = logging.getLogger("keylane.broker")

SPARE = 200  # for Redis, and for what else a worker opens


def allow_connections(most: int) -> None:
    """Raise this process's limit, which workers inherit, for so many connections to either port of a worker.

    A worker that has reached its limit cuts off whoever connects, without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = 2 * most + SPARE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (ValueError, OSError):  # the system has a limit of its own
            allowed = soft
    if allowed < most + SPARE:
        log.warning(
            "a worker may have %d open files, too few for max_connections %d: raise the limit "
            "(ulimit -n, LimitNOFILE) or lower max_connections",
            *(allowed, most),
        )
