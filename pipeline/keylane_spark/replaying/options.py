"""What a replay is asked to do."""

from datetime import datetime
from hashlib import sha256

import msgspec

_LONGEST = 240  # bytes of a note's name: file systems allow 255, and a draft of it has 15 more


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed, and where to."""

    server: str
    path: str
    topic: str
    source: str | None = None  # the archived topic; the only one if not named
    run_id: str = "replay"
    token: str | None = None
    payloads: str | None = None
    durability: str | None = None
    rate: float | None = None  # rows a second, of all tasks together
    since: datetime | None = None
    until: datetime | None = None
    keys: list[str] | None = None
    round_rows: int = 250_000
    dry_run: bool = False
    accept_duplicates: bool = False  # go on with a round of which the broker may have forgotten the uids

    @property
    def root(self) -> str:
        """The archive, without a slash at its end."""
        return self.path.rstrip("/")

    @property
    def note(self) -> str:
        """The file that says how far it is."""
        name = f"{self.topic}@{self.run_id}.json"
        if len(name.encode()) > _LONGEST:
            name = f"{self.topic[:100]}@{sha256(name.encode()).hexdigest()}.json"
        return f"{self.root}.keylane/replays/{name}"
