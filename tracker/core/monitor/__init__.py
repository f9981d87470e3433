"""What the tracker concludes from reports and from their absence."""
