"""Keeps the store in order: what may be removed, what takes the disk, what is damaged at rest."""
