"""Modules that are authored on one device: embedding collections, dense layers, whole models."""

from recsys.base.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
