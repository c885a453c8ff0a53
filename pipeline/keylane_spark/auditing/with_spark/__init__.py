"""The audit by Spark, for what does not fit into memory."""
