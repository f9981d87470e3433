"""Routes of the fleet's history."""
