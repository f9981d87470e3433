"""References on the command line: what a shell offers, and what a user means by part of one."""
