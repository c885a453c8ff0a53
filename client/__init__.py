"""The Keylane client: publish to topics and consume from subscriptions."""
