"""Rows into topics, each once."""
