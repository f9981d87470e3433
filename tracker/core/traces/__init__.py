"""Traces: what hosts recorded of the starts of packages."""
