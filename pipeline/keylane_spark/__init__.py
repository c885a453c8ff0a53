"""The Keylane data pipeline: topics in and out of Spark."""
