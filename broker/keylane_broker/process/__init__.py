"""A worker as a process of its own: its binary port and its HTTP port."""
