"""The audit of what fits into memory, without Spark and Java."""
