"""Replacing senders that fail."""
