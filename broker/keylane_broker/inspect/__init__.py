"""Looks at everything and changes nothing: counts, snapshots, and the checkers of the keyspace."""
