"""The client for code that does not await."""
