"""Images of upstream registries on one host."""
