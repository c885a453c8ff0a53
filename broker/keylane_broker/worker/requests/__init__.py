"""What each request does, by what it is about."""
