"""Consuming: what workers push, leases, settling."""
