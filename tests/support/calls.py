"""Which scripts are called."""

from typing import Any

import pytest

from keylane_broker.engine.engine import Engine


def watch_calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripts that are called from now on."""
    calls: list[str] = []
    run = engine.store.run

    async def counted(script: str, *rest: Any) -> list[Any]:
        calls.append(script)
        return await run(script, *rest)

    monkeypatch.setattr(engine.store, "run", counted)
    return calls
