"""Metrics as mergeable states: the value over many batches is that over their samples, not a mean of values of batches.

def metrics(self, output, target):  # of a doll.Task
    p = torch.sigmoid(output)
    return {"auc": metrics.auc(p, target), "log_loss": metrics.log_loss(p, target)}

Scores, probabilities, targets and weights are arrays or tensors of shape (n,). If samples have weights, give
`Task.metrics` a parameter `weight` and pass it on. Subclass `MetricState` for a metric that is not here.
"""

from doll.metrics.means import accuracy, calibration, log_loss, mean, ndcg, normalized_entropy, pinball_loss, rmse
from doll.metrics.ranking import auc, average_precision
from doll.metrics.states import MetricState, by_segment

__all__ = [
    "MetricState", "accuracy", "auc", "average_precision", "by_segment", "calibration", "log_loss", "mean", "ndcg",
    "normalized_entropy", "pinball_loss", "rmse",
]  # fmt: skip
