"""The commands of `keylane`, a module for each; what is slow to import waits until it is needed."""
