"""Files wherever Spark can reach them: on this machine, and on Hadoop's file systems."""

from keylane_spark.files.file_systems import files_at, local_at
from keylane_spark.files.files import Entry, Files
from keylane_spark.files.hadoop_files import HadoopFiles
from keylane_spark.files.local_files import LocalFiles, check_folder, check_written

__all__ = [
    "Entry",
    "Files",
    "HadoopFiles",
    "LocalFiles",
    "check_folder",
    "check_written",
    "files_at",
    "local_at",
]
