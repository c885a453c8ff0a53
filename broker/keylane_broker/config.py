"""The settings of a broker: a flag, an environment variable and a key of the file share each name.

For example `--max-frame`, `KEYLANE_MAX_FRAME` and `max_frame` in keylane.toml are the same setting; the flag
wins over the environment, that over the file, that over the default:

    settings = load(Path("keylane.toml"), port="9000")
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ByteSize, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    JsonConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from keylane.errors import did_you_mean
from keylane.payloads.store import HTTP, has_password, public
from keylane.redis import SCHEMES
from keylane_broker.limits import MAX_PARTITIONS

__all__ = ["ConfigError", "Settings", "load", "metavar_of", "nearly_settings"]

PREFIX = "KEYLANE_"
NOT_SETTINGS = ("SERVER", "TOKEN", "CONFIG")  # but variables that commands know
MIB = 1024 * 1024
MOST_WORKERS = 64  # on one machine
LAST_PORT = 65_535
LEAST_SECRET = 16  # characters of a token that somebody has chosen
LEAST_FRAME = 128 * 1024  # bytes: the largest message has to fit

# The text in each is what stands for a value in the help.
Number = Annotated[int, "N"]
Count = Annotated[int, Field(ge=1), "N"]
Size = Annotated[ByteSize, "SIZE"]
# A millisecond is the unit of the wire and of Redis: less would be nothing there.
Seconds = Annotated[float, Field(ge=0.001, allow_inf_nan=False), "S"]
# Less, and a busy machine is taken for a dead one.
Patience = Annotated[float, Field(ge=0.1, allow_inf_nan=False), "S"]
Url = Annotated[str, "URL"]


class ConfigError(ValueError):
    """A setting cannot be right; the text says which and where it came from."""


class Settings(BaseSettings):
    """Everything that can be set about a broker; durations are in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    host: Annotated[str, "HOST"] = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on."
    )
    port: Number = Field(
        default=9999,
        ge=0,
        le=LAST_PORT,
        description="Port of the first worker; the others take the ports after it. 0 picks free ports.",
    )
    http_port: Number = Field(
        default=8080,
        ge=0,
        le=LAST_PORT,
        description="HTTP port of the first worker, as with --port; 0 switches HTTP off.",
    )
    metrics: Annotated[bool, "BOOL"] = Field(
        default=True, description="Measure, and serve /metrics at the HTTP port."
    )
    auth: Annotated[bool, "BOOL"] = Field(
        default=False, description="Let in only who has a token; `keylane token` makes them."
    )
    admin_token: Annotated[str, "TOKEN"] = Field(
        default="",
        repr=False,
        description="A token that may do anything, to begin with. Better in the environment.",
    )
    jwt_keys: Annotated[Path | None, "FILE"] = Field(
        default=None, description="Keys of JWTs to accept: a JWK set, a public key as PEM, or a secret."
    )
    insecure: Annotated[bool, "BOOL"] = Field(
        default=False, description="Listen beyond loopback although anyone may then do anything."
    )
    tls_cert: Annotated[Path | None, "FILE"] = Field(
        default=None, description="Certificate chain, PEM; with it every port speaks TLS."
    )
    tls_key: Annotated[Path | None, "FILE"] = Field(
        default=None, description="Private key of the certificate, PEM, unless it is in the same file."
    )
    tls_client_ca: Annotated[Path | None, "FILE"] = Field(
        default=None, description="Authorities, PEM: clients must have a certificate by one of them."
    )
    workers: Number = Field(default=1, ge=1, le=MOST_WORKERS, description="Number of worker processes.")
    redis: Url = Field(
        default="", repr=False, description="URL of Redis or Valkey; without it, one is started here."
    )
    data_dir: Annotated[Path, "DIR"] = Field(
        default=Path("keylane-data"), description="Data directory of the embedded server."
    )
    advertise: Annotated[str, "ADDRESS"] = Field(
        default="",
        description="Address for clients, host or host:port; the port is the first worker's, as with --port.",
    )
    publish_rate: Annotated[float, Field(ge=0, allow_inf_nan=False), "N"] = Field(
        default=0.0,
        description="Messages a second that one token may publish through one worker; 0 is no limit.",
    )
    max_connections: Count = Field(default=10_000, description="Maximum client connections of one worker.")
    max_frame: Size = Field(
        default=ByteSize(16 * MIB), ge=LEAST_FRAME, description="Maximum size of a frame."
    )
    heartbeat: Patience = Field(default=10.0, description="Seconds between heartbeats.")
    session: Patience = Field(
        default=10.0, description="Seconds until a lost consumer's leases are given back."
    )
    partition_lease: Patience = Field(
        default=5.0, description="Seconds until a lost worker's partitions are free."
    )
    rebalance_interval: Seconds = Field(
        default=5.0, description="Seconds between load checks, each of which may move a partition."
    )
    default_partitions: Count = Field(default=8, description="Default partition count.")
    retention: Annotated[float, Field(ge=0, allow_inf_nan=False), "S"] = Field(
        default=0.0,
        description="Seconds that new topics keep settled messages, unless they say; 0 is not at all.",
    )
    max_partitions: Count = Field(
        default=MAX_PARTITIONS, le=MAX_PARTITIONS, description="Maximum partition count of a topic."
    )
    max_inflight_bytes: Size = Field(
        default=ByteSize(64 * MIB),
        ge=1024,
        description="Maximum bytes of publishes that wait for Redis in one worker, and of unfinished frames.",
    )
    max_unsent_bytes: Size = Field(
        default=ByteSize(256 * MIB),
        ge=1024,
        description="Maximum bytes that wait in one worker for clients to read; beyond it the slowest are "
        "disconnected.",
    )
    payloads: Url = Field(
        default="",
        repr=False,
        description="URL of the payload store for clients; by default the same Redis, or keylane+http:// "
        "where they may not reach it.",
    )
    payload_lifetime: Seconds = Field(
        default=7 * 86_400.0, description="Seconds to keep a body that no message refers to."
    )
    stop_timeout: Seconds = Field(default=10.0, description="Seconds that a worker has to stop cleanly.")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "LEVEL"] = Field(
        default="info", description="Minimum log level."
    )
    log_format: Annotated[Literal["text", "json"], "FORMAT"] = Field(
        default="text", description="How lines of the log are written: text, or json."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_yes_or_no_only_where_that_is_asked(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("it should be a value, not yes or no")
        return value

    @field_validator("redis")
    @classmethod
    def _is_a_redis_url(cls, url: str) -> str:
        scheme, separator, _ = url.partition("://")
        if url and (not separator or scheme not in SCHEMES):
            raise ValueError(
                f"it should be a URL that starts with one of {', '.join(f'{s}://' for s in SCHEMES)}"
            )
        if url:
            from keylane.redis.urls import check_url  # slow to import, and not needed without a URL

            check_url(url)
        return url

    @field_validator("payloads")
    @classmethod
    def _is_a_store_that_clients_can_open(cls, url: str) -> str:
        scheme, separator, place = url.partition("://")
        if scheme == "file" and not place.startswith("/"):
            raise ValueError(
                "it should have three slashes, file:///folder: else each process looks in its own folder"
            )
        if not url or (separator and place.strip("/") and scheme in SCHEMES):
            return url
        if separator and scheme in HTTP:
            return url
        if not separator or not place.strip("/"):
            raise ValueError(
                "it should be a URL like redis://host:6379/0, file:///folder, s3://bucket/folder, or "
                "keylane+http:// for the workers themselves"
            )
        if scheme == "memory":
            raise ValueError("memory:// belongs to one process; clients in others could not read a body")
        import fsspec  # type: ignore[import-untyped]  # only here: it takes its time

        if scheme.partition("::")[0] not in fsspec.available_protocols():
            raise ValueError(f"{scheme}:// is not supported; use redis, file, s3 or another that fsspec has")
        return url

    @field_validator("advertise")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address and _address(address) is None:
            raise ValueError("it should be an address like broker.example.com or broker.example.com:9999")
        return address

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if not self.tls_cert and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca need tls_cert, the certificate")
        return self

    @model_validator(mode="after")
    def _strangers_are_kept_out(self) -> Self:
        if self.auth and not self.admin_token and not self.jwt_keys:
            raise ValueError(
                "auth needs a first way in: set admin_token (KEYLANE_ADMIN_TOKEN) to a "
                "long secret, or jwt_keys"
            )
        if (self.admin_token or self.jwt_keys) and not self.auth:
            raise ValueError(
                "admin_token and jwt_keys have no effect unless tokens are asked for: add --auth"
            )
        if self.admin_token and len(self.admin_token) < LEAST_SECRET:
            raise ValueError(
                f"admin_token is too short to be a secret: use {LEAST_SECRET} characters or more"
            )
        if not (self.auth or self.tls_client_ca or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"host is {self.host}: anyone who reaches it may do anything; require a token "
                "(--auth) or a certificate (--tls-client-ca), or set --insecure if the network is trusted"
            )
        return self

    @model_validator(mode="after")
    def _passwords_are_for_those_who_are_known(self) -> Self:
        if has_password(self.payloads) and not (self.auth or self.tls_client_ca):
            raise ValueError(
                "payloads has a password, which every client would be told: require a token "
                "(--auth), or use keylane+http://, so that workers store bodies for clients"
            )
        if self.payloads.startswith(HTTP) and not self.http_port:
            raise ValueError("payloads is by HTTP, which http_port 0 switches off: set http_port")
        return self

    @model_validator(mode="after")
    def _rates_are_of_tokens(self) -> Self:
        if self.publish_rate and not self.auth:
            raise ValueError("publish_rate is for each token: it needs auth")
        return self

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Self:
        if self.default_partitions > self.max_partitions:
            raise ValueError(
                f"default_partitions is {self.default_partitions}; "
                f"it should be at most max_partitions, {self.max_partitions}"
            )
        return self

    @model_validator(mode="after")
    def _there_is_a_port_for_every_worker(self) -> Self:
        _, advertised = _address(self.advertise) or ("", None)
        ports = {"port": self.port, "http_port": self.http_port, "the port of advertise": advertised or 0}
        for name, port in ports.items():
            if port + self.workers - 1 > LAST_PORT:
                raise ValueError(f"{name} is {port}: {self.workers} workers need ports up to {LAST_PORT}")
        if self.port and self.http_port and abs(self.port - self.http_port) < self.workers:
            raise ValueError(
                f"port is {self.port} and http_port {self.http_port}: {self.workers} workers need as many "
                "ports from each on, and none twice"
            )
        return self

    def of_worker(self, number: int, port: int, http_port: int = 0) -> Self:
        """Return the settings of one of several workers, which listens on these ports."""
        host, first = _address(self.advertise) or ("", None)
        advertised = f"{host}:{port if first is None else first + number}" if host else ""
        return self.model_copy(update={"port": port, "http_port": http_port, "advertise": advertised})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _address(text: str) -> tuple[str, int | None] | None:
    """Return host and, if there is one, port; None if the text is not an address."""
    found = re.fullmatch(r"(\[[^\]\s]+\]|[^:\s\[\]]+)(?::(\d{1,5}))?", text)
    if found is None or (found[2] and not 0 < int(found[2]) <= LAST_PORT):
        return None
    return found[1], int(found[2]) if found[2] else None


def metavar_of(setting: str) -> str:
    """Return what stands for the value of a setting in the help."""
    return next(item for item in Settings.model_fields[setting].metadata if isinstance(item, str))


def load(file: Path | None = None, /, **flags: object) -> Settings:
    """Load the settings from flags (None: not given), environment and file.

    Raises ConfigError, which says what is wrong and where it came from.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    outside = EnvSettingsSource(Settings)()
    in_file = _read(file) if file else {}
    try:
        return Settings.model_validate({**in_file, **outside, **given})
    except ValidationError as error:
        complaints = [_complaint(detail, given, outside, file) for detail in error.errors()]
        raise ConfigError("; ".join(complaints)) from None


def nearly_settings() -> list[str]:
    """Return what to say of each environment variable that is like a setting's, and of none."""
    known = [*NOT_SETTINGS, *map(str.upper, Settings.model_fields)]
    ours = [name.removeprefix(PREFIX) for name in sorted(os.environ) if name.startswith(PREFIX)]
    # Kubernetes makes variables of services, KEYLANE_SERVICE_PORT of one that is called keylane.
    asked = [name for name in ours if name not in known and not name.startswith("SERVICE_")]
    hints = {name: did_you_mean(name, known) for name in asked}
    return [
        f"environment variable {PREFIX}{name} is no setting{hint}" for name, hint in hints.items() if hint
    ]


def _read(file: Path) -> dict[str, Any]:
    """Read a TOML or JSON file."""
    kind = "JSON" if file.suffix == ".json" else "TOML"
    source = JsonConfigSettingsSource if kind == "JSON" else TomlConfigSettingsSource
    try:
        file.open("rb").close()  # for pydantic a file that is not there is an empty one
        return source(Settings, file)()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid {kind}: {error}") from None
    except TypeError:
        raise ConfigError(f"{file} should hold an object of settings") from None


def _complaint(
    detail: ErrorDetails, flags: dict[str, object], outside: dict[str, Any], file: Path | None
) -> str:
    problem = detail["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    if not detail["loc"]:
        return problem
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        known = list(Settings.model_fields)
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        return f"{file} has an unknown setting {name!r}{hint}"
    if name in flags:
        where = f"--{name.replace('_', '-')}"
    elif name in outside:
        where = f"environment variable {PREFIX}{name.upper()}"
        if str(detail["input"]).startswith("tcp://"):
            problem += (
                "; Kubernetes sets it for a service of that name: say enableServiceLinks: false in the pod"
            )
    else:
        where = f"{name!r} in {file}"
    return f"{where} is {_shown(name, detail['input'])!r}: {problem}"


def _shown(name: str, value: Any) -> Any:
    """Return a value as it may be shown: no secret, and no password in a URL."""
    if name == "admin_token":
        return "…"
    return public(value) if name in ("redis", "payloads") and isinstance(value, str) else value
