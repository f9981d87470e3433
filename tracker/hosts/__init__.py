"""Single hosts, as the operators of a fleet see them and what they have them do."""
