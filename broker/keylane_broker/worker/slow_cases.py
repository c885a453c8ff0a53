"""How often to try a script for the ordinary case where cases are not ordinary: each attempt is in vain."""

_MOST = 64  # cases between two attempts


class SlowCases:
    """After a case that was not ordinary the next ones count as slow, the more the more there have been."""

    def __init__(self) -> None:
        self._ahead = 0  # cases that count as slow
        self._last = 0  # how many there were after the last one

    def is_likely(self) -> bool:
        """Return whether the next case counts as slow."""
        if self._ahead:
            self._ahead -= 1
            return True
        return False

    def met(self) -> None:
        """One was."""
        self._last = self._ahead = min(2 * self._last + 1, _MOST)

    def passed(self) -> None:
        """One was not."""
        self._last = 0
