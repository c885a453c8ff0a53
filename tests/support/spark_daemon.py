"""Spark's own daemon, which forks its Python workers, with what they import already imported.

Spark forks a worker for each plan and most tasks of a test, and each would import all of this anew.
"""

import runpy

import pandas  # type: ignore[import-untyped]  # noqa: F401
import pyarrow  # noqa: F401

import keylane_spark.datasource
import keylane_spark.sink.writer
import keylane_spark.source.batch
import keylane_spark.source.stream  # noqa: F401

if __name__ == "__main__":
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
