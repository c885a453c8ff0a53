"""How the processes of a broker write their log: one line an event, on stderr."""

import logging
import sys

__all__ = ["start_logging"]


def start_logging(level: str) -> None:
    """Write what is at least of this level."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
