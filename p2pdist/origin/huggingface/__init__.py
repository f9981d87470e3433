"""Hugging Face hubs that are not ours."""
