"""`keylane pipeline`: a module for the commands of each kind."""
