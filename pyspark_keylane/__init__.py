"""Makes `format("keylane")` known to Spark, which looks into every module whose name begins with pyspark_."""

from pipeline.datasource import KeylaneSource as DefaultSource

__all__ = ["DefaultSource"]
