"""Serving packages: folders with a program, tables and row updates, for a server."""
