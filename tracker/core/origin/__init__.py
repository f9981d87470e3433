"""Says which hosts read central storage."""
