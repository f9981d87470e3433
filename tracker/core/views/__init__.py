"""Views of the fleet for watchers: they read it and change nothing."""
