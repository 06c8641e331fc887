"""Optional training loop: a `Trainer`, its loggers, and one ending for a script.

The loop only joins parts of this library, and owns no state that the parts do not have. Every part
works without it: docs/training.md shows the same loop written by hand and in other frameworks. The
files in reading order:

- `trainer`: the settings of the loop.
- `job`: one run of the loop.
- `optimizer`: all optimizers of a model as one.
- `batches`: batches of a loader, with the position to resume from.
- `buffers`: buffers that each rank has its own values of.
- `evaluation`: metrics of an evaluation.
- `progressive`: metrics of training batches before they train.
- `named_metrics`: metrics of `recsys.metrics` by name.
- `full_ranking`: metrics of models of the next item.
- `best`: the best evaluation, early stopping, and the result of a job.
- `loggers`: destinations of the numbers.
- `progress`: the mean loss, the rate and the bar.
- `ending`: one message for an interrupt, a lost rank, a full disk.
"""

from recsys.training.best import FitResult
from recsys.training.ending import exit_on_error
from recsys.training.evaluation import BinaryMetrics, Metrics
from recsys.training.full_ranking import FullRanking
from recsys.training.loggers import JsonLines, Lines, Logger, MLflow, TensorBoard, WandB
from recsys.training.named_metrics import NamedMetrics
from recsys.training.progressive import ProgressiveValidation
from recsys.training.trainer import Trainer

__all__ = [
    "BinaryMetrics",
    "FitResult",
    "FullRanking",
    "JsonLines",
    "Lines",
    "Logger",
    "MLflow",
    "Metrics",
    "NamedMetrics",
    "ProgressiveValidation",
    "TensorBoard",
    "Trainer",
    "WandB",
    "exit_on_error",
]
