"""What people and programs are shown of the plan."""
