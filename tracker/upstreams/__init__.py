"""Upstream registries as a tracker reads them for its whole fleet."""
