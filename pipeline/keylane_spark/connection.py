"""How jobs, readers and writers reach the broker and the payload store."""

from collections.abc import Mapping

import msgspec

import keylane  # whose clients are slow to import, and come when they are used
from keylane.connect.seeds import server_or_default, token_or_default
from keylane_spark.options import refuse


class Connection(msgspec.Struct, frozen=True):
    """How to reach the cluster and the payload store."""

    server: str
    token: str | None = None
    payloads: str | None = None
    timeout: float = 30.0  # seconds for which a broker that is away is looked for

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "Connection":
        """From the options server, token and payloads, and the environment of the driver."""
        named = {name.lower(): value for name, value in options.items()}
        server = str(server_or_default(named.get("server") or None))
        if not server.startswith(("keylane://", "keylanes://")):
            refuse("server", server, "keylane://host:port, or several: keylane://a:9999,b:9999")
        return cls(server, token_or_default(named.get("token") or None), named.get("payloads") or None)

    def options(self) -> dict[str, str]:
        """As the data source takes it."""
        named = {"server": self.server, "token": self.token, "payloads": self.payloads}
        return {name: value for name, value in named.items() if value}

    def sync(self) -> "keylane.Client":
        """A client, to be entered with `with`."""
        return keylane.Client(self.server, token=self.token, payloads=self.payloads, timeout=self.timeout)

    def client(self) -> "keylane.AsyncClient":
        """A client, to be entered with `async with`."""
        return keylane.AsyncClient(
            self.server, token=self.token, payloads=self.payloads, timeout=self.timeout
        )
