"""Serving packages: a folder that has a program, its tables and their description."""
