"""Vouched piece lists at simulated hosts."""
