"""What an agent answers over HTTP and its Unix socket, and the client of it."""
