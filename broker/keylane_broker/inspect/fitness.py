"""Whether a Redis is fit to keep messages: what was found, how bad it is, and what to do about it."""

import logging
from typing import Literal, NamedTuple

from keylane.errors import BrokerError, InvalidArgument
from keylane_broker.errors import ServerError
from keylane_broker.store.server_info import LOWEST, facts_of
from keylane_broker.store.store import Store

__all__ = ["FitnessFinding", "advice_on", "examine", "require_fit"]

log = logging.getLogger("keylane.broker")

PATIENCE = 5.0  # seconds; whoever starts a broker sits and waits

# What an error says, and what to do about it; the first that fits counts.
ADVICE = (
    ("AUTH <password> called without any password", "it needs no password: remove it from the URL"),
    (
        "refuses the credentials",
        "put the right ones into the URL, redis://user:password@host:port/0",
    ),
    ("DB index is out of range", "choose a database that it has, such as redis://host:port/0"),
    ("loading the dataset", "start again when it has loaded its data"),
    ("Cluster mode is not enabled", "it is a single server: use redis://host:port/0"),
    ("'SENTINEL'", "it is not a Sentinel: use redis://host:port/0"),
    (
        "No master found",
        "check the name behind the slash, redis+sentinel://host:port/master, and start Sentinel",
    ),
    ("is not Redis", "give the address of a Redis or Valkey with --redis"),
    ("Timeout", "does a Redis listen there, with TLS for rediss:// and without it for redis://?"),
    ("closed by server", "does a Redis listen there, with TLS for rediss:// and without it for redis://?"),
    ("Name or service not known", "check the host in --redis"),
    ("nodename nor servname", "check the host in --redis"),
)
OTHERWISE = "start it, or choose another with --redis"


class FitnessFinding(NamedTuple):
    """The outcome of one check: a broker must not start on what is unfit, and should not on what is risky."""

    check: str
    grade: Literal["fit", "risky", "unfit"]
    detail: str
    advice: str = ""


def advice_on(error: Exception) -> str:
    """Return what to do about a Redis that cannot be used."""
    return next((advice for said, advice in ADVICE if said in str(error)), OTHERWISE)


async def require_fit(url: str) -> None:
    """Raise ServerError if a Redis cannot be used or would lose messages; warn of what is merely risky."""
    try:
        store = Store.connect(url, patience=PATIENCE)
        try:
            findings = await examine(store)
        finally:
            await store.close()
    except InvalidArgument as error:
        raise ServerError(str(error)) from None
    except BrokerError as error:
        raise ServerError(f"{str(error).rstrip('.')}; {advice_on(error)}") from None
    for finding in findings:
        if finding.grade == "unfit":
            raise ServerError(f"{finding.detail}; {finding.advice}")
    for finding in findings:
        if finding.advice:
            level = logging.WARNING if finding.grade == "risky" else logging.INFO
            log.log(level, "%s; %s", finding.detail, finding.advice)


async def examine(store: Store) -> list[FitnessFinding]:
    """Look at every master; raises only if none of them answers."""
    masters = await store.masters()
    findings = []
    for name, answer in masters.items():
        of_it = f" of {name}" if len(masters) > 1 else ""
        if isinstance(answer, BrokerError):
            found = [FitnessFinding("redis", "risky", str(answer), advice_on(answer))]
        else:
            found = _examine(name, facts_of(answer.info), answer.appendfsync, store.clustered)
        findings += [
            item._replace(check=item.check + of_it, detail=item.detail + (of_it and f" on {name}"))
            for item in found
        ]
    return findings


def _examine(
    name: str, facts: dict[str, str], appendfsync: str | None, clustered: bool
) -> list[FitnessFinding]:
    """Judge what one server says of itself."""
    return [
        _kind(name, facts, clustered),
        _eviction(name, facts, configurable=appendfsync is not None),
        _persistence(name, facts, appendfsync),
    ]


def _kind(name: str, facts: dict[str, str], clustered: bool) -> FitnessFinding:
    number = facts.get("valkey_version") or facts.get("redis_version") or "0"
    product = f"{'Valkey' if 'valkey_version' in facts else 'Redis'} {number}"
    mode = facts.get("server_mode") or facts.get("redis_mode")
    wrong = advice = ""
    if mode == "sentinel":
        wrong, advice = (
            "is a Sentinel",
            f"use redis+sentinel://{name}/ and the name that it has for the master",
        )
    elif tuple(int(part) for part in number.split(".")[:2]) < LOWEST:
        wrong = f"is {product}, which is too old"
        advice = f"Keylane needs Redis {LOWEST[0]}.{LOWEST[1]} or newer, or Valkey"
    elif mode == "cluster" and not clustered:
        wrong, advice = "is a node of a cluster", f"use redis+cluster://{name}"
    elif facts.get("role") == "slave":
        master = f"{facts.get('master_host')}:{facts.get('master_port')}"
        wrong = f"is a replica of {master}, which does not accept writes"
        advice = "name the master, or let Sentinel find it with redis+sentinel://"
    return (
        FitnessFinding("redis", "unfit", f"{name} {wrong}", advice)
        if wrong
        else FitnessFinding("redis", "fit", product)
    )


def _eviction(name: str, facts: dict[str, str], *, configurable: bool) -> FitnessFinding:
    policy = facts.get("maxmemory_policy", "unknown")
    detail = f"maxmemory-policy {policy}"
    if policy == "noeviction":
        return FitnessFinding("eviction", "fit", detail)
    advice = f"so that no message vanishes: {_mended(name, 'maxmemory-policy noeviction', configurable)}"
    if facts.get("maxmemory", "0") == "0":
        return FitnessFinding(
            "eviction", "risky", f"{detail}: Redis will evict messages once it has a maxmemory", advice
        )
    return FitnessFinding("eviction", "unfit", f"{detail}: Redis evicts messages when memory is full", advice)


def _persistence(name: str, facts: dict[str, str], appendfsync: str | None) -> FitnessFinding:
    if facts.get("aof_enabled") != "1":
        mended = _mended(name, "appendonly yes", configurable=appendfsync is not None)
        return FitnessFinding(
            "persistence", "risky", "appendonly no: a restart of Redis loses what was confirmed", mended
        )
    if appendfsync is None:
        unknown = "appendonly yes, appendfsync not known, since this Redis does not allow CONFIG"
        return FitnessFinding("persistence", "fit", unknown, "make sure that it is everysec or always")
    detail = f"appendonly yes, appendfsync {appendfsync}"
    if appendfsync == "no":
        lost = "a power cut loses what the system has not written by itself, half a minute of it or more"
        return FitnessFinding(
            "persistence", "risky", f"{detail}: {lost}", _mended(name, "appendfsync everysec", True)
        )
    return FitnessFinding("persistence", "fit", detail)


def _mended(name: str, setting: str, configurable: bool) -> str:
    """Return the command that changes a setting."""
    if not configurable:
        return f"set {setting} in the configuration of this service, which does not allow CONFIG"
    host, _, port = name.rpartition(":")
    where = f"-h {host} -p {port}" if port.isdecimal() else f"-s {name}"
    command = f"redis-cli {where} CONFIG SET {setting}"
    return f"{command} (and set it in the configuration file, so that it survives a restart)"
