"""How the processes of a broker write their log: one line an event, on stderr."""

import logging
import sys

__all__ = ["start_logging"]


def start_logging(level: str, who: str = "") -> None:
    """Write what is at least of this level; `who` says which of several processes it comes from."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {who}{' ' if who else ''}%(name)s: %(message)s",
    )
