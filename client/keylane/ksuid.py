"""KSUIDs: names of 27 characters that sort by the second they were made in and never repeat.

A KSUID is 4 bytes of seconds since 1400000000 and 16 random bytes, written in base 62.
"""

import os
import secrets
import threading
import time

from keylane.errors import InvalidArgument

EPOCH = 1_400_000_000  # unix seconds
LENGTH = 27

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_PAIRS = [high + low for high in _DIGITS for low in _DIGITS]


class _Sequence:
    """Counts through the last two digits of a random KSUID, which costs a tenth of making each anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._head = 0  # the number that all digits but the last two write
        self._text = ""
        self._next = len(_PAIRS)  # the pair to use next; here there is none left

    def take(self, count: int, drift: float) -> list[str]:
        taken: list[str] = []
        with self._lock:
            self._begin_second(int(time.time() + drift) - EPOCH)
            while (missing := count - len(taken)) > 0:
                if self._next >= len(_PAIRS):
                    self._begin_head()
                head, first = self._text, self._next
                taken += [head + pair for pair in _PAIRS[first : first + missing]]
                self._next = first + missing
        return taken

    def _begin_second(self, second: int) -> None:
        # A clock that was put back does not count: later names are larger, always.
        if second > self._second:
            # The top bit stays free, so that counting on cannot reach into the seconds.
            self._second = second
            self._head = (second << 128 | secrets.randbits(127)) // len(_PAIRS)
            self._next = len(_PAIRS)

    def _begin_head(self) -> None:
        # A random step keeps the next names as hard to guess, and those of other processes away.
        self._head += 1 + secrets.randbits(64)
        self._text = _encode(self._head, LENGTH - 2)
        self._next = 0


def take(count: int, drift: float = 0.0) -> list[str]:
    """Make new KSUIDs, each larger than all that this process has made before.

    The clock that counts is `drift` seconds ahead of this machine's.

    >>> first, second = take(2)
    >>> len(first), first < second
    (27, True)
    """
    return _sequence.take(count, drift)


def time_of(ksuid: str) -> float:
    """Return the unix time in seconds at which a KSUID was made.

    >>> time_of("0ujtsYcgvSTl8PAuAdqWYSMnLOv")
    1507608047.0
    """
    return float(EPOCH + int.from_bytes(raw(ksuid)[:4]))


def first_at(instant: float) -> str:
    """Return the KSUID that sorts before all others of that second, in unix time."""
    return _encode(max(0, int(instant) - EPOCH) << 128, 27)


def raw(ksuid: str) -> bytes:
    """Return the 20 bytes of a KSUID. Raises InvalidArgument if it is not one."""
    number = 0
    if len(ksuid) == LENGTH and _VALUES.keys() >= set(ksuid):
        for digit in ksuid:
            number = number * 62 + _VALUES[digit]
    if not 0 < number < 1 << 160:
        raise InvalidArgument(f"{ksuid[:60]!r} is not a KSUID, which has 27 letters and digits")
    return number.to_bytes(20)


def _encode(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))


def _start_afresh() -> None:
    """Forget the sequence: the parent of a fork goes on with it, and may hold its lock."""
    global _sequence
    _sequence = _Sequence()


_sequence = _Sequence()
os.register_at_fork(after_in_child=_start_afresh)
