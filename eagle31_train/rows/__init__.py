"""Rows of the user's files: whatever kind of file holds them, and in whatever format each is written."""
