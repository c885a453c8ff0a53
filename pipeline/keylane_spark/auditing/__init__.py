"""The audit: proof that every message reached whoever was owed it."""
