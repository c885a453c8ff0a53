"""Archives replayed into topics."""
