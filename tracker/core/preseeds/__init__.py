"""Preseeds: orders to hold a package, and their progress."""
