"""REST over HTTP: every operation of the client, for programs that have none."""
