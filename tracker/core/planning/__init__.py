"""Gives hosts their parents and their upload slots."""
