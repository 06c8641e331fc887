"""The runner of documents: the text that it takes for code, and its findings of failing code."""

from __future__ import annotations

from pathlib import Path

from tests.compat.spec import Outcome, blocks_of, indented, outcomes_of

FLAT = """
class Model(Base):
def __init__(self, size):
super().__init__()
self.size = size
def forward(self, x):
return (
x + self.size
)
model = Model(3)
for name, weight in model.items():
# what it has
print(name)
use(weight)
done = True
"""

INDENTED = """
class Model(Base):
    def __init__(self, size):
        super().__init__()
        self.size = size
    def forward(self, x):
        return (
        x + self.size
        )
model = Model(3)
for name, weight in model.items():
    # what it has
    print(name)
    use(weight)
done = True
"""

DOCUMENT = """# A page

```
!pip install it
```

```
import torch
import torchrec
config = torchrec.EmbeddingBagConfig(
name="films", embedding_dim=4, num_embeddings=9, feature_names=["film"]
)
ebc = torchrec.EmbeddingBagCollection(device=torch.device("cuda"), tables=[config])
```

```
torch.Size([2, 4])
films: ok
```

```
from torchrec.modules.embedding_configs import NoSuchConfig
from torchrec.distributed import ShardingEnv
print(ShardingEnv.from_local(1, 0), device)
ebc.no_such_attribute
```
"""


def test_indentation_is_put_back() -> None:
    assert indented(FLAT).strip() == INDENTED.strip()


def test_paragraphs_of_a_page_without_blocks() -> None:
    page = "Ten tables, for example.\n\nx = [\n    1,\n]\n\n| a |\ny = x\n\nz = f(\n    1,\n\nEnd"
    assert blocks_of(page) == ["x = [1]", "y = x", "z = f(1)"]


def test_a_document_is_run_under_both_names(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(DOCUMENT)
    first, second = outcomes_of(path)
    assert first[0] == "import torch"
    assert first[1] == first[2] == Outcome(4, [])
    for outcome in second[1:]:
        assert outcome.statements == 4
        missing, attribute = outcome.failures
        assert "NoSuchConfig" in missing
        assert "no_such_attribute" in attribute
        assert str(outcome).startswith("2 of 4 fail: ")
