"""Score an exported model. Needs only torch and fbgemm_gpu, like a server.

python examples/dlrm/score.py MODEL.pt TEST.pt SCORES.pt

In C++: examples/cpp/. It writes the same SCORES.pt.
"""

import hashlib
import json
import sys
from pathlib import Path

import fbgemm_gpu  # noqa: F401  registers the operators the program calls
import torch
from torch.nn.functional import binary_cross_entropy


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of (positive, negative) pairs in the right order, ties counted half."""
    _, group = torch.unique(scores, sorted=True, return_inverse=True)
    negatives = torch.bincount(group, weights=1.0 - labels)
    below = negatives.cumsum(0) - negatives
    wins = (below + negatives / 2)[group][labels > 0.5].sum()
    return (wins / (labels.sum() * (1.0 - labels).sum())).item()


def verify_checksum(path: str) -> None:
    """End unless a file matches the checksum that was written with it."""
    expected = Path(f"{path}.sha256").read_text().split()[0]
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
            sys.exit(f"{path} is damaged: it does not match its checksum in {path}.sha256.")


def main() -> None:
    verify_checksum(sys.argv[1])
    model = torch.jit.load(sys.argv[1])
    test = torch.load(sys.argv[2])
    with torch.inference_mode():
        logits = [model(*inputs) for inputs in test["inputs"]]
        score = torch.cat(logits).squeeze(1).sigmoid().double()
    label = torch.cat(test["labels"]).double()
    assert "recsys" not in sys.modules
    loss = binary_cross_entropy(score, label)
    entropy = binary_cross_entropy(torch.full_like(label, label.mean().item()), label)
    result = {
        "auc": auc(score, label),
        "ne": (loss / entropy).item(),
        "loss": loss.item(),
    }
    torch.save(logits, sys.argv[3])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
