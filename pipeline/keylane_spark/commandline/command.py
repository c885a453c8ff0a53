"""What the pipeline's commands share: a Spark session, and a look at the broker before Java starts."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Concatenate, ParamSpec

import typer

from keylane.commandline.command import Run, add_command
from keylane.commandline.output import CommandError
from keylane.commandline.typed import parse_pair
from keylane_spark.commandline.spark_errors import explain_spark_error
from keylane_spark.connection import Connection
from keylane_spark.errors import JobError
from keylane_spark.files import check_folder, local_at
from keylane_spark.session import JavaMissing, session

if TYPE_CHECKING:  # takes a second to import, and may not be installed
    from pyspark.sql import SparkSession

__all__ = ["Job", "SinceOption", "TopicArgument", "command"]

INSTALL = "the pipeline needs Spark: pip install 'keylane[spark]'"
LOG = Path(__file__).parents[1] / "log4j2.properties"
SMALL = 1_000_000  # rows
QUIET = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic name.", show_default=False)]
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Only what was published at this time or later (UTC by default).",
        show_default=False,
    ),
]

P = ParamSpec("P")
Action = Callable[Concatenate["Job", P], None]


class Job(Run):
    """One run of a command that is a job on Spark."""

    options: ClassVar[dict[str, Any]] = {
        "master": Annotated[
            str | None, typer.Option("--master", metavar="URL", help="Spark master.", show_default="local[*]")
        ],
        "conf": Annotated[
            list[str] | None,
            typer.Option(
                "--conf", metavar="NAME=VALUE", help="Spark setting; may be repeated.", show_default=False
            ),
        ],
        "server": Run.options["server"],
        "token": Annotated[
            str | None, typer.Option("--token", help="Client token.", show_default="$KEYLANE_TOKEN")
        ],
        "payloads": Annotated[
            str | None,
            typer.Option(
                "--payloads", metavar="URL", help="Payload store URL.", show_default="what the broker says"
            ),
        ],
        "json": Run.options["json"],
    }

    def __init__(
        self,
        server: str | None = None,
        json: bool = False,
        master: str | None = None,
        conf: Sequence[str] | None = None,
        token: str | None = None,
        payloads: str | None = None,
    ) -> None:
        super().__init__(server, json)
        self.payloads = payloads
        if token:  # for all that this process starts, as if it had been there from the beginning
            os.environ["KEYLANE_TOKEN"] = token
        self.master = master
        self.wording: dict[
            str, str
        ] = {}  # what errors of the data source advise -> what this command has instead
        self._conf = QUIET | dict(parse_pair(word, "--conf") for word in conf or ())

    @property
    def connection(self) -> Connection:
        """How to reach the cluster and the payload store."""
        return Connection.parse({"server": self.server, "payloads": self.payloads or ""})

    def needs(self, *packages: str) -> None:
        """Raise CommandError, with the command that installs them, unless these packages are here."""
        if any(find_spec(package) is None for package in packages):
            raise CommandError(INSTALL)

    def check_topics(self, *topics: str) -> int:
        """Check that the broker answers and has these topics, which takes no Java, as Java takes seconds.

        Returns how many messages there are in their logs, at most.
        """
        with self.connection.sync() as client:
            found = [at for topic in topics for at in client.offsets(topic)]
        return sum(at.latest - at.earliest for at in found)

    def check_folder(self, path: str) -> None:
        """Check that a folder can be written to, which takes no Java if it is on this machine."""
        if (files := local_at(path)) is not None:
            check_folder(files.plain(path))

    def spark(self, app: str, rows: int | None = None) -> "SparkSession":
        """The session for so many rows, if that is known; quiet unless spark.log.level says otherwise."""
        self.needs("pyspark", "pyarrow")
        # Java takes its options when it starts, which is before Spark reads a configuration.
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Dlog4j2.configurationFile={LOG.as_uri()}")
        # Of a call to Java that Ctrl-C came into py4j logs a page.
        logging.getLogger().addFilter(lambda record: "while sending command" not in record.getMessage())
        spark = session(app, self.master, **(for_rows(rows, self.master) | self._conf))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Spark's would call Java from within a call
        spark.sparkContext.setLogLevel(self._conf["spark.log.level"])
        return spark

    def explain(self, error: Exception) -> CommandError | None:
        """Errors of jobs, of files and of Spark have a text for people."""
        if isinstance(error, JobError):
            return CommandError(str(error), code=error.code, retriable=error.retriable, status=error.status)
        if isinstance(error, JavaMissing):
            return CommandError(str(error))
        if isinstance(error, OSError) and error.filename is not None:  # a folder that somebody has named
            return CommandError(f"{error.filename}: {error.strerror}")
        if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
            return explain_spark_error(str(error), self.wording)
        return None


def for_rows(rows: int | None, master: str | None) -> dict[str, str]:
    """Settings for a job of so many rows: seconds of work need neither 200 tasks nor the best code.

    >>> for_rows(200, "spark://host:7077")
    {'spark.sql.shuffle.partitions': '2'}
    """
    if rows is None or rows > SMALL:
        return {}
    settings = {"spark.sql.shuffle.partitions": str(max(2, rows // 50_000))}
    if (master or "local").startswith("local"):
        settings["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return settings


def command(app: typer.Typer, name: str) -> Callable[[Action[P]], Action[P]]:
    """Make a function a command, with --server, --token, --payloads, --json, --master and --conf added.

    @command(pipeline, "archive")
    def archive(job: Job, topic: Annotated[str, typer.Argument()]) -> None: ...
    """

    def register(action: Action[P]) -> Action[P]:
        add_command(app, name, Job, action)
        return action

    return register
