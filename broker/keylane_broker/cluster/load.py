"""How busy the partitions of a worker are: averages of the last seconds, for placement and for people."""

import math
from collections.abc import Mapping

from keylane_broker.engine.values import Place

_MEMORY = 10.0  # seconds after which two thirds of what was measured are forgotten
_IDLE = 0.01  # a second: less is not worth a word
_REPORTED = 200  # partitions, the busiest


class LoadMeter:
    """Messages and milliseconds of script time a second, by partition."""

    def __init__(self) -> None:
        self.rates: dict[Place, tuple[float, float]] = {}

    def add(self, taken: Mapping[Place, tuple[int, int]], seconds: float) -> None:
        """Take in the messages and microseconds of the last so many seconds."""
        fresh = 1 - math.exp(-seconds / _MEMORY)
        rates = {}
        for place in self.rates.keys() | taken.keys():
            messages, microseconds = taken.get(place, (0, 0))
            before = self.rates.get(place, (0.0, 0.0))
            rate = (
                before[0] + fresh * (messages / seconds - before[0]),
                before[1] + fresh * (microseconds / 1_000 / seconds - before[1]),
            )
            if max(rate) > _IDLE:
                rates[place] = rate
        self.rates = rates

    def total(self) -> tuple[float, float]:
        """Return messages and milliseconds a second, of all partitions."""
        return sum(rate[0] for rate in self.rates.values()), sum(rate[1] for rate in self.rates.values())

    def busiest(self) -> dict[str, tuple[float, float]]:
        """Return the same for the busiest partitions, by `topic:partition`."""
        places = sorted(self.rates, key=lambda place: self.rates[place][1], reverse=True)[:_REPORTED]
        return {
            f"{topic}:{number}": (round(messages, 2), round(milliseconds, 3))
            for topic, number in places
            for messages, milliseconds in [self.rates[topic, number]]
        }


def loads_of(reports: Mapping[str, tuple[float, float]]) -> dict[Place, tuple[float, float]]:
    """Return the rates of a report by place."""
    places = ((*name.rpartition(":")[::2], rate) for name, rate in reports.items())
    return {(topic, int(number)): rate for topic, number, rate in places}
