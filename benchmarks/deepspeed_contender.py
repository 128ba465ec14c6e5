"""The same model under DeepSpeed's pipeline engine: two ranks over gloo, with torch's cut and fused optimiser.

    python deepspeed_contender.py SHAPE_JSON MODEL.onnx WARMUP RANK PORT

DeepSpeed is no dependency: `DS_BUILD_OPS=0 pip install deepspeed` installs it beside this project without its compiled
operations, which this benchmark does not need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_contender import RANKS, Stage, best_cut, loss_of, optimizer_of, pieces_of, time_pieces
from training_shape import Shape, batches
from turns import serve


def microbatches(shape: Shape) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    parts = (
        zip(*(torch.from_numpy(array).chunk(shape.microbatches) for array in batch), strict=True)
        for batch in batches(shape)
    )
    return chain.from_iterable(parts)


def engine_of(stages: list[nn.Module], shape: Shape) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    module = PipelineModule(stages, num_stages=RANKS, loss_fn=loss_of, partition_method="uniform")
    optimizer = optimizer_of(list(module.parameters()), shape)
    sizes = {"train_batch_size": shape.samples, "train_micro_batch_size_per_gpu": shape.microbatch_samples}
    # It clips gradients by default.
    config = sizes | {
        "gradient_accumulation_steps": shape.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    # The last stage divides its loss by the number of microbatches, and every other stage the gradient of its outputs
    # once more (0.19.8), so that its parameters learn too slowly. Without that, its losses are those of the other
    # contenders.
    engine._backward_prologue_per_tensor = lambda gradient: gradient
    return engine


def main() -> None:
    shape, model_file, warmup, rank, port = Shape.from_json(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
    where = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DS_ACCELERATOR": "cpu",
    }
    os.environ |= {name: str(value) for name, value in where.items()}
    with redirect_stdout(sys.stderr):  # its messages must not mix with the protocol
        import deepspeed
        from deepspeed import comm

        torch.set_num_threads(1)
        deepspeed.init_distributed("gloo", verbose=False)
    pieces = pieces_of(shape, model_file)
    shared: list[Any] = [best_cut(time_pieces(pieces, shape), [[rank] for rank in range(RANKS)]) if rank == 0 else None]
    torch.distributed.broadcast_object_list(shared)
    cut: list[int] = shared[0]
    # Pieces of other ranks take no memory here; DeepSpeed gets identities in their place.
    stages = [
        Stage(pieces[a:b], shape) if number == rank else nn.Identity() for number, (a, b) in enumerate(pairwise(cut))
    ]
    del pieces
    with redirect_stdout(sys.stderr):
        engine = engine_of(stages, shape)
    data = microbatches(shape)

    def run(steps: int) -> list[float]:
        losses = [float(engine.train_batch(data)) for _ in range(steps)]
        return losses if rank == RANKS - 1 else []

    losses = run(warmup)
    serve(
        {f"rank {rank}": os.getpid()}, {"pieces": "+".join(str(b - a) for a, b in pairwise(cut)), "losses": losses}, run
    )
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
