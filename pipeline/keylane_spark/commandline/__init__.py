"""The commands of `keylane pipeline`, a module for each."""
