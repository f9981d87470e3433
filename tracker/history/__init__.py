"""Keeps what a fleet reports, and gives it to those that ask."""
