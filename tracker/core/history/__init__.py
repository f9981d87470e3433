"""What a fleet's tracker reports of what has happened, for people."""
