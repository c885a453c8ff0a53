"""The command-line kit that broker and pipeline share; nothing else of the client imports it."""
