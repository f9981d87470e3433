"""Who reads central storage."""
