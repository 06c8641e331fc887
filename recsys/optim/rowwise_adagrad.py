"""Row-wise Adagrad, under the module name users import it from."""

from recsys.optim.optimizers import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]
