"""Settings come from flags, the environment and a file, and what is wrong is named."""

import json
from pathlib import Path

import pytest
import typer

from keylane_broker.commandline.main import app
from keylane_broker.config import ConfigError, Settings, load, metavar_of


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A file that sets a port, a host and a size."""
    path = tmp_path / "keylane.toml"
    path.write_text('port = 1001\nhost = "127.0.0.9"\nmax_frame = "1MiB"\n')
    return path


def test_without_anything_the_defaults_count() -> None:
    """They are those of the documentation."""
    settings = load()
    assert (settings.host, settings.port, settings.workers, settings.redis) == ("127.0.0.1", 9999, 1, "")
    assert (settings.session, settings.partition_lease, settings.default_partitions) == (10.0, 5.0, 8)
    assert settings.retention == 0


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place is asked only where the ones before it are silent."""
    assert load(toml).port == 1001
    monkeypatch.setenv("KEYLANE_PORT", "1002")
    assert load(toml).port == 1002
    assert load(toml, port="1003").port == 1003
    assert load(toml, port="1003").host == "127.0.0.9"
    assert load(toml, port=None).port == 1002


def test_a_json_file_says_the_same_as_a_toml_file(toml: Path, tmp_path: Path) -> None:
    """The suffix tells which it is."""
    path = tmp_path / "keylane.json"
    path.write_text(json.dumps({"port": 1001, "host": "127.0.0.9", "max_frame": 1_048_576}))
    assert load(path) == load(toml)


def test_settings_survive_the_way_to_another_process(toml: Path) -> None:
    """They travel as JSON, and the environment there does not change them."""
    settings = load(toml, redis="redis://127.0.0.1:6379/0", data_dir="elsewhere")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_an_unknown_key_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    """Or all there are, if none is near."""
    path = tmp_path / "keylane.toml"
    path.write_text("max_frames = 1")
    with pytest.raises(ConfigError, match="unknown setting 'max_frames'; did you mean 'max_frame'"):
        load(path)
    path.write_text("zzz = 1")
    with pytest.raises(ConfigError, match="unknown setting 'zzz'; known are host, port"):
        load(path)


def test_a_bad_value_names_its_key_and_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody looks for it in the wrong place."""
    path = tmp_path / "keylane.toml"
    path.write_text("port = 70000")
    with pytest.raises(ConfigError, match=r"'port' in .*keylane.toml is 70000: it should be .*65535"):
        load(path)
    monkeypatch.setenv("KEYLANE_PORT", "many")
    with pytest.raises(ConfigError, match="environment variable KEYLANE_PORT is 'many'"):
        load(path)
    with pytest.raises(ConfigError, match="--max-connections is '0': it should be"):
        load(port=1, max_connections="0")


@pytest.mark.parametrize("name", ["port", "http_port"])
def test_a_variable_that_kubernetes_makes_of_a_service_is_told_from_a_mistake(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is called keylane, as many would call it, makes a KEYLANE_PORT in every pod beside it."""
    monkeypatch.setenv(f"KEYLANE_{name.upper()}", "tcp://10.0.0.1:9999")
    with pytest.raises(ConfigError, match=r"Kubernetes.*enableServiceLinks: false"):
        load()
    assert getattr(load(None, **{name: "9000"}), name) == 9000


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_number_is_not_yes_or_no(value: str, tmp_path: Path) -> None:
    """In JSON and TOML these would be 1 and 0."""
    path = tmp_path / "keylane.json"
    for name in ("port", "workers", "max_frame", "session"):
        path.write_text(f'{{"{name}": {value}}}')
        with pytest.raises(ConfigError, match=f"'{name}' in .*keylane.json is {value.title()}: it should be"):
            load(path)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"redis": "http://localhost"}, "--redis is 'http://localhost': it should be a URL"),
        ({"advertise": "local:host"}, "--advertise is 'local:host': it should be an address"),
        ({"advertise": "localhost:0"}, "--advertise is 'localhost:0': it should be an address"),
        ({"workers": "65"}, "--workers is '65': it should be less than or equal to 64"),
        ({"workers": "3", "port": "65534"}, "port is 65534: 3 workers need ports up to 65535"),
        ({"port": "8080", "http_port": "8080"}, "port is 8080 and http_port 8080"),
        (
            {"workers": "2", "port": "8081", "http_port": "8080"},
            "port is 8081 and http_port 8080: 2 workers need",
        ),
        ({"workers": "2", "advertise": "a:65535"}, "the port of advertise is 65535: 2 workers need ports"),
        ({"heartbeat": "inf"}, "--heartbeat is 'inf': it should be a finite number"),
        ({"log_level": "loud"}, "--log-level is 'loud': it should be 'debug', 'info'"),
        (
            {"max_partitions": "10001"},
            "--max-partitions is '10001': it should be less than or equal to 10000",
        ),
        ({"default_partitions": "9", "max_partitions": "8"}, "it should be at most max_partitions, 8"),
    ],
)
def test_what_cannot_be_right_is_refused(flags: dict[str, str], text: str) -> None:
    """With the value and what it should be."""
    with pytest.raises(ConfigError, match=text):
        load(**flags)


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("", ["", ""]),
        ("broker.example.com", ["broker.example.com:7000", "broker.example.com:7001"]),
        ("broker.example.com:9999", ["broker.example.com:9999", "broker.example.com:10000"]),
        ("[2001:db8::7]:80", ["[2001:db8::7]:80", "[2001:db8::7]:81"]),
    ],
)
def test_each_worker_advertises_an_address_of_its_own(advertise: str, told: list[str]) -> None:
    """Counted from the port that is given, else the one that it listens on."""
    settings = load(advertise=advertise, workers=2)
    workers = [settings.of_worker(number, 7000 + number) for number in range(2)]
    assert [worker.advertise for worker in workers] == told
    assert [worker.port for worker in workers] == [7000, 7001]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, broken, or not made of settings."""
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none.toml: No such file"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("port 9")
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML"):
        load(broken)
    listed = tmp_path / "listed.json"
    listed.write_text("[1]")
    with pytest.raises(ConfigError, match=r"listed.json should hold an object"):
        load(listed)


def test_every_setting_is_a_flag_of_serve() -> None:
    """With the text of the setting, and a word for its value."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {flag.name: flag for flag in command.get_params(typer.Context(command))}
    for name, field in Settings.model_fields.items():
        assert flags[name].opts == [f"--{name.replace('_', '-')}"]
        assert (flags[name].help, flags[name].metavar) == (field.description, metavar_of(name))
    assert flags.keys() - Settings.model_fields.keys() == {"config", "json", "help"}
    assert command.get_params(typer.Context(command)) == list(flags.values())


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("heartbeat", "0.0004", "0.1"),
        ("session", "0.0004", "0.1"),
        ("partition_lease", "0.0004", "0.1"),
        ("payload_lifetime", "0.0004", "0.001"),
        ("max_frame", "1024", "131072"),
        ("payloads", "foo", "URL"),
        ("payloads", "redis://", "URL"),
        ("payloads", "foo://bar", "foo:// is not supported"),
        ("payloads", "memory://bodies", "one process"),
    ],
)
def test_settings_with_which_nobody_could_use_the_broker_are_refused(
    name: str, value: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is '{value}'.*{complaint}"):
        load(**{name: value})


@pytest.mark.parametrize("url", ["redis+cluster://a:1,b:2", "file:///bodies", "s3://bucket/folder", ""])
def test_payload_stores_that_clients_may_have_are_taken(url: str) -> None:
    assert load(payloads=url).payloads == url
