"""What frames say: the properties of each type, requests beside their replies."""
