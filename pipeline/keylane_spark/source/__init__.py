"""Topics into Spark: batch and streaming readers."""
