"""Adapters: graph passes that add small trainable weights to a frozen model."""
