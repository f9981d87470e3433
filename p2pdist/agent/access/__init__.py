"""Access: the agent's identity in its fleet, and what it lets others have."""
