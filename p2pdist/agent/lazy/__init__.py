"""Lazy views of an agent: contents come while programs read them."""
