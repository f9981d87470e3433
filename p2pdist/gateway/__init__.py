"""Interfaces that other projects' clients speak, served from what the agent holds and fetches."""
