"""The tracker decides which host sends what to which; data never passes through it."""
