"""Modules that are authored on one device: embedding collections, dense layers, whole models."""
