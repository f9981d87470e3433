"""The tracker's HTTP interface: thin handlers that decode, submit or query, and encode."""
