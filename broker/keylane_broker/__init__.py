"""The Keylane server: stateless workers whose only state is Redis or Valkey."""
