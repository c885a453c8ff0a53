"""Which payload store clients are told of."""

from typing import Any

import pytest

from keylane.errors import InvalidArgument
from keylane.payloads import open_store
from keylane_broker.config import ConfigError, Settings, load
from keylane_broker.worker.advertised_store import advertised, stored_in

REDIS = "redis://db:6379/0"
SECRET = "redis://user:canary@db:6379/0"
TOKEN = "the token of an administrator"


@pytest.mark.parametrize(
    ("redis_url", "settings", "told"),
    [
        (REDIS, {}, REDIS),
        (REDIS, {"auth": True, "admin_token": TOKEN}, "keylane+http://"),
        (REDIS, {"advertise": "broker.example.com"}, "keylane+http://"),
        (REDIS, {"advertise": "broker.example.com", "redis": REDIS}, REDIS),
        (REDIS, {"payloads": "keylane+http://"}, "keylane+http://"),
        (REDIS, {"payloads": "keylane+https://bodies.example.com"}, "keylane+https://bodies.example.com"),
        (
            REDIS,
            {"payloads": "redis://other:6379/0", "auth": True, "admin_token": TOKEN},
            "redis://other:6379/0",
        ),
        (REDIS, {"auth": True, "admin_token": TOKEN, "http_port": 0}, ""),
        (SECRET, {}, "keylane+http://"),
        (SECRET, {"http_port": 0}, ""),
        (SECRET, {"auth": True, "admin_token": TOKEN, "http_port": 0}, ""),
        (SECRET, {"payloads": "file:///bodies"}, "file:///bodies"),
    ],
)
def test_clients_are_told_of_the_workers_where_they_should_not_have_redis(
    redis_url: str, settings: dict[str, Any], told: str
) -> None:
    made = Settings(**{"http_port": 8080, **settings})
    assert advertised(made, redis_url) == told
    own = made.payloads if made.payloads.startswith(("redis:", "file:")) else redis_url
    assert stored_in(made, redis_url) == own


def test_with_tls_it_is_https(tmp_path: Any) -> None:
    made = Settings(http_port=8080, auth=True, admin_token=TOKEN, tls_cert=tmp_path / "cert.pem")
    assert advertised(made, REDIS) == "keylane+https://"


def test_a_folder_that_depends_on_where_a_program_runs_is_no_store() -> None:
    with pytest.raises(ConfigError, match="three slashes"):
        load(payloads="file://bodies")
    with pytest.raises(InvalidArgument, match="file:///folder"):
        open_store("file://bodies", lifetime=1.0)


@pytest.mark.parametrize("named", [{"admin_token": TOKEN}, {"jwt_keys": "keys.json"}])
def test_who_says_who_may_come_in_is_told_that_the_door_is_open(named: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="add --auth"):
        load(**named)


def test_a_password_is_not_for_everybody_and_never_shown() -> None:
    with pytest.raises(ConfigError, match="--auth") as refused:
        load(payloads=SECRET)
    made = load(payloads=SECRET, redis=SECRET, auth=True, admin_token=TOKEN)
    wrong = "redis://user:canary@db:port/0"
    for flag in ("redis", "payloads"):
        with pytest.raises(ConfigError) as unreadable:
            load(**{flag: wrong, "workers": -1})
        assert "canary" not in str(unreadable.value)
    with pytest.raises(ConfigError) as short:
        load(admin_token="canary")
    for text in (refused.value, repr(made), str(made), short.value):
        assert "canary" not in str(text)
        assert TOKEN not in str(text)
