"""Interfaces of batches in pipelines: copies to a device, and use on several streams."""

from recsys.base.streamable import Multistreamable as Multistreamable
from recsys.base.streamable import Pipelineable as Pipelineable

__all__ = ["Multistreamable", "Pipelineable"]
