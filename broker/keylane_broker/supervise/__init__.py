"""Keeps a broker running: the embedded server and the worker processes."""
