"""What the commands of the pipeline share: the Spark session, how they print, and how they fail."""

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from keylane_spark.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from keylane_spark.connection import Connection

__all__ = ["Job", "Trouble", "Usage", "command", "moment"]

INSTALL = "the pipeline needs Spark: pip install 'keylane[spark]'"
LOG = Path(__file__).parents[1] / "log4j2.properties"
SMALL = 1_000_000  # rows
INTERRUPTED = 130  # as shells have it for Ctrl-C
QUIET = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

# As an executor's Python tells it, in the middle of a page of JVM.
_NAMED = re.compile(r"^keylane(?:\.errors|_spark(?:\.\w+)+)\.(\w+): (.+)$", re.MULTILINE)

P = ParamSpec("P")
Action = Callable[Concatenate["Job", P], None]


class Trouble(Exception):
    """Something that a job found wrong by itself; the command ends with status 1."""

    code = "failed"
    retriable = False
    status = 1


class Usage(Trouble):
    """What was typed cannot be meant."""

    code = "usage"
    status = 2


def moment(option: str, text: str | None) -> datetime | None:
    """What was typed as a time; UTC unless it says another zone, as in all that we print.

    >>> moment("--since", "2026-11-16T13:00")
    datetime.datetime(2026, 11, 16, 13, 0, tzinfo=datetime.timezone.utc)
    """
    if text is None:
        return None
    from keylane.times import typed

    try:
        return typed(text)
    except ValueError:
        raise Usage(f"{option} {text!r} is no time: write it as 2026-11-16T13:00:00Z") from None


class Job:
    """One run of a command."""

    def __init__(
        self,
        server: str | None = None,
        json: bool = False,
        master: str | None = None,
        conf: Sequence[str] = (),
        token: str | None = None,
        payloads: str | None = None,
    ) -> None:
        from keylane.connect.seeds import server_or_default

        self.server = str(server_or_default(server))
        self.payloads = payloads
        self.json = json
        if token:  # for all that this process starts, as if it had been there from the beginning
            os.environ["KEYLANE_TOKEN"] = token
        self.master = master
        self._conf = dict(QUIET)
        for word in conf:
            name, separator, value = word.partition("=")
            if not (name and separator):
                raise Usage(f"--conf {word!r} is not of the form name=value")
            self._conf[name] = value

    @property
    def connection(self) -> "Connection":
        """How to reach the cluster and the payload store."""
        from keylane_spark.connection import Connection

        return Connection.parse({"server": self.server, "payloads": self.payloads or ""})

    def needs(self, *packages: str) -> None:
        """Raise Trouble, with the command that brings them, unless these packages are here."""
        if any(find_spec(package) is None for package in packages):
            raise Trouble(INSTALL)

    def check_topics(self, *topics: str) -> int:
        """See that the broker answers and has these topics: that takes no Java, which takes seconds.

        How many messages there are in their logs, at most.
        """
        with self.connection.sync() as client:
            found = [at for topic in topics for at in client.offsets(topic)]
        return sum(at.latest - at.earliest for at in found)

    def spark(self, app: str, rows: int | None = None) -> "SparkSession":
        """The session for so many rows, if that is known; quiet unless spark.log.level says otherwise."""
        self.needs("pyspark", "pyarrow")
        from keylane_spark.session import JavaMissing, session

        # Java takes its options when it starts, which is before Spark reads a configuration.
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Dlog4j2.configurationFile={LOG.as_uri()}")
        conf = for_rows(rows, self.master) | self._conf
        try:
            spark = session(app, self.master, **conf)
        except JavaMissing as error:
            raise Trouble(str(error)) from error
        spark.sparkContext.setLogLevel(self._conf["spark.log.level"])
        return spark

    def progress(self, text: str) -> None:
        """Tell people how far it is, beside the result."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def say(self, value: object, text: str) -> None:
        """Print the result as one line of JSON, or the sentences that tell it."""
        if self.json:
            import msgspec

            text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def run(self, action: Callable[[], None]) -> int:
        """Run a command to its end and return the exit status."""
        from keylane.errors import BrokerError

        try:
            action()
        except (Trouble, JobError) as error:
            return self.fail(error.code, str(error), error.retriable, error.status)
        except BrokerError as error:
            return self.fail(error.code, str(error), error.retriable)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
                raise
            return self.fail(*told_by_spark(str(error)))
        return 0

    def fail(self, code: str, message: str, retriable: bool, status: int = 1) -> int:
        """Say what went wrong and return the exit status."""
        if self.json:
            problem = {"code": code, "message": message, "retriable": retriable}
            self.progress(json.dumps({"error": problem}, ensure_ascii=False))
        else:
            self.progress(f"error: {message}")
        return status


def for_rows(rows: int | None, master: str | None) -> dict[str, str]:
    """Settings for a job of so many rows: what is over in seconds needs neither 200 tasks nor the best code.

    >>> for_rows(200, "spark://host:7077")
    {'spark.sql.shuffle.partitions': '2'}
    """
    if rows is None or rows > SMALL:
        return {}
    settings = {"spark.sql.shuffle.partitions": str(max(2, rows // 50_000))}
    if (master or "local").startswith("local"):
        settings["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return settings


def told_by_spark(text: str) -> tuple[str, str, bool]:
    """Code, message and retriable of an error that came through Spark: the one that we named, if any.

    >>> told_by_spark("…\\nclient.errors.TopicNotFound: no topic 'ordes'\\n\\n\\tat org.apache.spark…")
    ('topic_not_found', "no topic 'ordes'", False)
    """
    from keylane import errors

    if found := _NAMED.findall(text):
        name, message = found[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.BrokerError):
            return kind.code, message, kind.retriable
        return "failed", message, False
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "spark", lines[0] if lines else "Spark has failed without a word", False


def command(app: typer.Typer, name: str) -> Callable[[Action[P]], Action[P]]:
    """Make a function a command, with --server, --token, --payloads, --json, --master and --conf added.

    @command(pipeline, "archive")
    def archive(job: Job, topic: Annotated[str, typer.Argument()]) -> None: ...
    """

    def register(action: Action[P]) -> Action[P]:
        app.command(name)(_runner(action))
        return action

    return register


def _runner(action: Action[P]) -> Callable[..., None]:
    """The function behind a command, with a signature that typer understands."""

    @functools.wraps(action)
    def run(
        ctx: typer.Context,
        server: str | None,
        json: bool,
        master: str | None,
        conf: list[str] | None,
        token: str | None,
        payloads: str | None,
        **arguments: Any,
    ) -> None:
        # The command line of the broker has these two in front as well.
        before = ctx.find_root().obj
        server = server or getattr(before, "server", None)
        json = json or bool(getattr(before, "json", False))
        try:
            job = Job(server, json, master, conf or [], token, payloads)
        except Usage as error:
            raise typer.Exit(Job(server, json).fail(error.code, str(error), False, 2)) from None
        raise typer.Exit(job.run(functools.partial(action, job, **arguments)))

    own = list(inspect.signature(action).parameters.values())[1:]
    shared = [
        _keyword("ctx", typer.Context, inspect.Parameter.empty),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        _keyword("master", _MASTER, None),
        _keyword("conf", _CONF, None),
        _keyword("server", _SERVER, None),
        _keyword("token", _TOKEN, None),
        _keyword("payloads", _PAYLOADS, None),
        _keyword("json", _JSON, False),
    ]
    run.__signature__ = inspect.Signature(shared)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shared}
    return run


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


_MASTER = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark's master; local[*] by default.", show_default=False),
]
_CONF = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="Spark setting; repeat.", show_default=False),
]
_SERVER = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help="Which broker; else KEYLANE_SERVER counts.", show_default=False
    ),
]
_TOKEN = Annotated[
    str | None,
    typer.Option("--token", help="Of the client; else KEYLANE_TOKEN counts.", show_default=False),
]
_PAYLOADS = Annotated[
    str | None,
    typer.Option(
        "--payloads", metavar="URL", help="The payload store; else the broker says.", show_default=False
    ),
]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]
