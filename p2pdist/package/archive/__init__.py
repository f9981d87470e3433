"""Packages from and to tar archives and container images."""
