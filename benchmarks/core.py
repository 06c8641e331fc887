"""The C++ core on one thread: one call beside TorchScript, and calls while rows are updated.

    python -m benchmarks.core

The model is a DLRM with 26 quantized tables of 100,000 rows, 64 int8 values each. TorchScript is
TorchRec's quantized DLRM with the same weights (extra `peers`); it takes turns with the package.
Build the core first: `make predictor`.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import recsys.inference
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

ROOT = Path(__file__).parents[1]
TABLES, TABLE_ROWS, DIM = 26, 100_000, 64
ROW_BYTES = 80
"""64 values, scale and bias, padded to 16 bytes."""
DENSE_LAYERS, OVER_LAYERS = [256, 128, DIM], [256, 128, 1]
FEATURES = [f"f{i}" for i in range(TABLES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predictor", type=Path, default=ROOT / "build/predictor")
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each program")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each number of rows")
    parser.add_argument("--updates", type=float, default=500_000, help="rows per second")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = own_dlrm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "peer.pt"
        torch.jit.save(peer_script(model), script)
        version = recsys.inference.package(
            recsys.inference.quantize_embeddings(model), folder / "dlrm", example(2)
        )
        one_call = compiled("one_call", folder, options.predictor)
        for rows in (1, 32):
            for _ in range(options.repeats):
                run(one_call, version, script, rows, options.rounds, TABLES, TABLE_ROWS)
        updates = compiled("row_updates", folder, options.predictor)
        figures = (TABLES, TABLES, TABLE_ROWS, ROW_BYTES)
        run(updates, version, options.updates, 10_000, 5, *figures)


def own_dlrm() -> DLRM:
    tables = [
        EmbeddingBagConfig(TABLE_ROWS, DIM, f"t{i}", feature_names=[FEATURES[i]])
        for i in range(TABLES)
    ]
    collection = EmbeddingBagCollection(tables=tables)
    return DLRM(collection, 13, list(DENSE_LAYERS), list(OVER_LAYERS)).eval()


def example(rows: int) -> tuple[Tensor, KeyedJaggedTensor]:
    ids = torch.randint(TABLE_ROWS, (TABLES * rows,))
    lengths = torch.ones(TABLES * rows, dtype=torch.long)
    return torch.rand(rows, 13), KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def peer_script(model: DLRM) -> torch.jit.ScriptModule:
    """Quantize TorchRec's DLRM with the weights of a model, and compile it."""
    from torchrec.fx import Tracer
    from torchrec.inference.modules import quantize_embeddings
    from torchrec.models.dlrm import DLRM as PeerDLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig as PeerConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection as PeerCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as PeerJagged

    class Program(nn.Module):
        def __init__(self, dlrm: nn.Module) -> None:
            super().__init__()
            self.dlrm = dlrm

        def forward(self, dense_features: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
            features = PeerJagged(keys=FEATURES, values=ids, lengths=lengths)
            scores: Tensor = self.dlrm(dense_features, features)
            return scores

    tables = [
        PeerConfig(
            num_embeddings=TABLE_ROWS, embedding_dim=DIM, name=f"t{i}", feature_names=[FEATURES[i]]
        )
        for i in range(TABLES)
    ]
    peer = PeerDLRM(PeerCollection(tables=tables), 13, list(DENSE_LAYERS), list(OVER_LAYERS))
    peer.load_state_dict(model.state_dict())
    program = Program(quantize_embeddings(peer.eval(), torch.qint8, inplace=True)).eval()
    graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(program)
    script: torch.jit.ScriptModule = torch.jit.script(torch.fx.GraphModule(program, graph))
    return script


def compiled(name: str, folder: Path, predictor: Path) -> Path:
    """Compile one of the C++ benchmarks."""
    library = (predictor / "librecsys_predictor.so").resolve()
    package = Path(torch.__file__).parent
    include = package / "include"
    subprocess.run(
        [
            "g++", "-std=c++20", "-O2", str(ROOT / f"benchmarks/{name}.cpp"), "-o",
            str(folder / name), f"-I{ROOT / 'recsys/inference/cpp'}", f"-I{include}",
            f"-I{include / 'torch/csrc/api/include'}", str(library), f"-L{package / 'lib'}",
            "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{package / 'lib'}:{library.parent}",
            "-Wl,--no-as-needed",
        ],
        check=True,
    )  # fmt: skip
    return folder / name


def run(program: Path, *arguments: object) -> None:
    print(f"{program.name}:", end=" ", flush=True)
    subprocess.run([str(program), *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
