"""Limits that the settings of a broker and the engine share."""

MAX_PARTITIONS = 10_000  # of one topic
MAX_PERMITS = 10_000  # of one consumer
MAX_JOURNAL = 10**9  # records of one partition
MAX_MS = 10**12  # a duration of some 30 years
MAX_TIME_MS = 10**13
MAX_BYTES = 10**15  # of bodies
FOREVER = -1  # as a duration
MAX_PRIORITY = 9
MAX_SPREAD = 8
MAX_RETRIES = 1_000_000
MAX_REASON = 1_000  # characters of why a message failed that are kept
