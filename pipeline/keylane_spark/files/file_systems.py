"""Which file system a path is on."""

import os
from typing import TYPE_CHECKING, Any

from keylane_spark.files.files import Files
from keylane_spark.files.hadoop_files import HadoopFiles
from keylane_spark.files.local_files import LocalFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def files_at(path: str, spark: "SparkSession") -> Files:
    """The files of a path: of this machine if Hadoop says so, which may have another default."""
    jvm: Any = spark.sparkContext._gateway.jvm  # type: ignore[union-attr]
    conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
    scheme = jvm.org.apache.hadoop.fs.Path(path).getFileSystem(conf).getUri().getScheme()
    return LocalFiles() if scheme == "file" else HadoopFiles(spark, path)


def local_at(path: str) -> LocalFiles | None:
    """The files of a path before there is Java; None where only Hadoop can tell what it is."""
    scheme = path.partition("/")[0].partition(":")[0] if ":" in path.partition("/")[0] else ""
    here = scheme == "file" or (not scheme and "HADOOP_CONF_DIR" not in os.environ)
    return LocalFiles() if here else None
