"""A power cut: the server forgets what it had written last."""

import shutil
from pathlib import Path

from keylane_broker.supervise.embedded_server import Server
from tests.support.running import RunningBroker


class PowerCut:
    """A broker whose server can go back to what it had on its disk some time ago."""

    def __init__(self, folder: Path, server: Server, broker: RunningBroker) -> None:
        self._server, self.broker = server, broker
        self._saved = folder / "saved"
        self._files = server.data_dir / "appendonlydir"

    def save(self) -> None:
        """Remember what is on the disk."""
        shutil.copytree(self._files, self._saved)

    def strike(self) -> None:
        """End the server at once; all that was written since save() is lost."""
        self._server.kill()
        shutil.rmtree(self._files)
        shutil.copytree(self._saved, self._files)
        self._server.start()
