"""What a benchmark measured, before it is compared with anything."""

import statistics

import msgspec


class Sample(msgspec.Struct):
    """One round: messages a second; ms to the application; us of CPU a message, by process."""

    rate: float
    p50: float
    p99: float
    producer: float
    worker: float
    redis: float
    consumer: float
    disorder: int  # messages of a key that did not come next after the one before


class Result(msgspec.Struct):
    """The rounds of one contender of a line."""

    line: str
    contender: str
    samples: list[Sample]

    def each(self, what: str) -> list[float]:
        """A figure of each round."""
        return [getattr(sample, what) for sample in self.samples]

    def median(self, what: str) -> float:
        """A figure, in the middle of the rounds."""
        return statistics.median(self.each(what))
