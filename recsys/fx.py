"""`torch.fx` graphs of models with jagged inputs, as `torchrec.fx`."""

from recsys.inference.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]
