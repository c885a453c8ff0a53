"""Makes `format("keylane")` known to Spark, which looks into every module whose name begins with pyspark_."""

from keylane_spark.datasource import KeylaneSource as DefaultSource

__all__ = ["DefaultSource"]
