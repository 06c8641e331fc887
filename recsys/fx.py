"""Graphs of models that take jagged batches: `torchrec.fx` of here."""

from recsys.inference.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]
