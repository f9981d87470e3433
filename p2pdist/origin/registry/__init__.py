"""Packages in a repository of an OCI registry."""
