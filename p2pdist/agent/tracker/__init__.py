"""The agent's session with a tracker."""
