"""The commands of `keylane`, a module for each noun; what is slow to import waits until it is needed."""
