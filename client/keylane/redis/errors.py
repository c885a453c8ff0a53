"""What Redis answers when it refuses a command, as redis-py's errors, and those as ours."""

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from keylane.errors import BrokerError, Overloaded, Unavailable

_KINDS: dict[str, type[Exception]] = {
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "LOADING": BusyLoadingError,
    "MASTERDOWN": MasterDownError,
    "MOVED": MovedError,
    "NOAUTH": AuthenticationError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
    "WRONGPASS": AuthenticationError,
}
_NO_FUNCTION = "ERR Function not found"  # a script that is called as one


# After these a server is asked for again: where it is, who is the master, which node has the slot.
LOST = (ConnectionError, TimeoutError, ClusterError, ReadOnlyError)
PASSING = (*LOST, RedisClusterException, TryAgainError)
# Errors that redis-py has no class for, of a server that takes no commands or no writes for now.
_REFUSALS = ("BUSY", "MISCONF", "NOREPLICAS")


def error_of(text: str) -> Exception:
    """Return redis-py's error for what a server answers behind its minus sign."""
    word, _, rest = text.partition(" ")
    kind = NoScriptError if text == _NO_FUNCTION else _KINDS.get(word)
    return kind(rest) if kind else ResponseError(text)


def passes(error: Exception) -> bool:
    """Return whether an error is of the kind that goes away by itself."""
    if isinstance(error, AuthenticationError):
        return False
    return isinstance(error, (*PASSING, OSError)) or _reason(error).partition(" ")[0] in _REFUSALS


def named(error: Exception, server: str) -> BrokerError | None:
    """Return the error of ours that trouble with a server stands for; None where it is about the command."""
    text = str(error).partition(" : <")[0] or type(error).__name__  # behind it redis-py shows its objects
    if isinstance(error, OutOfMemoryError):
        return Overloaded(f"{server} has reached its maxmemory: {text}")
    if isinstance(error, AuthenticationError):
        return Unavailable(f"{server} refuses the credentials: {text}")
    if isinstance(error, (*PASSING, AskError, OSError)):
        return Unavailable(f"{server} cannot be reached: {text}")
    if passes(error):
        return Unavailable(f"{server} refuses commands for now: {_reason(error)}")
    return None


def _reason(error: Exception) -> str:
    return str(error).rpartition("caused error: ")[2]  # what redis-py puts before it in a transaction
