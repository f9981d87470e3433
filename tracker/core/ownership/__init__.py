"""Shares the swarms among several trackers."""
