"""The corpus: models, and how each is trained, cut and scheduled. Together they use every pass, every schedule, every
optimiser and every precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import penstock as ps
from penstock.frontends.running_statistics import at_rest
from penstock.frontends.training import attach_loss
from penstock.ir.attrs import Attr
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.passes.lengths.bound import BoundOptions
from penstock.passes.manager import Call, Event, run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, inference_pipeline, training_pipeline

from . import models

DEVICES = Path(__file__).with_name("cluster.toml")
PAIR, FOUR, SMALL, GPUS = (
    ("cpu:0", "cpu:1"),
    ("cpu:0", "cpu:1", "cpu:2", "cpu:3"),
    ("small:0", "small:1"),
    ("cuda:0", "cuda:1"),
)


PAIRS = ("cpu:0 cpu:1", "cpu:2 cpu:3")


@dataclass(frozen=True)
class Case:
    """A model and a plan for it; `training` is None for inference. `groups` names the devices of each stage where some
    have several, `library` is who computes contractions on GPUs; `mesh` and `layouts` split tensors, `zero` variables;
    `packs` are the stages of a device, `offload` what is elsewhere, `update_on` who updates weights. For
    inference, `weights` are the bits of weights, and `bounded` lets the number of samples change."""

    make: Callable[[], ps.Model]
    training: ps.Training | None
    schedule: str = "1f1b"
    devices: tuple[str, ...] = PAIR
    groups: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    precision: str = "f32"
    recompute: str = "auto"
    wire: str = "f32"
    library: str = ""
    mesh: str = ""
    layouts: tuple[str, ...] = ()
    weights: int = 32
    bounded: bool = False
    zero: int = 0
    packs: int = 1
    offload: str = "none"
    update_on: tuple[str, ...] = ()


def trained(
    optimizer: object = None, loss: str = "cross_entropy", microbatches: int = 2, **options: object
) -> ps.Training:
    return ps.Training(loss, optimizer or ps.SGD(lr=0.1), microbatches, **options)  # type: ignore[arg-type]


ADAMW, MOMENTUM = ps.AdamW(lr=1e-3), ps.Momentum(lr=0.02, nesterov=True)
GROUPS = (ps.Group("bias", weight_decay=0.0), ps.Group("fc1", frozen=True), ps.Group("fc2", kind="sgd", lr=0.5))
WIDE = (6, 16, 16, 16, 5)

CASES: dict[str, Case] = {
    # Every schedule, every optimiser.
    "mlp-1f1b": Case(lambda: models.mlp(*WIDE), trained(microbatches=4), devices=FOUR),
    "mlp-gpipe": Case(lambda: models.mlp(*WIDE), trained(ps.Adagrad(), rate=ps.Steps(every=10)), "gpipe"),
    "mlp-2bw": Case(
        lambda: models.mlp(*WIDE), trained(ADAMW, rate=ps.Cosine(steps=100, warmup=5), microbatches=4), "2bw", FOUR
    ),
    "mlp-eager-2bw": Case(lambda: models.mlp(*WIDE), trained(ps.Lion(), microbatches=3), "eager-2bw"),
    "mlp-zb-1f1b": Case(lambda: models.mlp(*WIDE), trained(MOMENTUM, microbatches=3), "zb-1f1b", FOUR[:3]),
    "mlp-groups": Case(lambda: models.mlp(*WIDE), trained(ADAMW, groups=GROUPS, clip=1.0, rate=ps.Linear(steps=9))),
    "mlp-f64": Case(
        lambda: models.mlp(*WIDE, dtype="f64"), trained(ps.Adam(weight_decay=0.1), loss="mse"), devices=FOUR[:1]
    ),
    "mlp-muon": Case(lambda: models.mlp(*WIDE), trained(ps.Muon(adjust="match_rms_adamw"), skip_nonfinite=True)),
    # Unequal devices, several devices for a stage, a host elsewhere, little memory.
    "mlp-unequal": Case(lambda: models.mlp(32, 256, 256, 256, 10), trained(microbatches=4), devices=("fast", "cpu:0")),
    "mlp-replicas": Case(
        lambda: models.mlp(*WIDE),
        trained(microbatches=6),
        "2bw",
        FOUR[:3],
        groups=("cpu:0 cpu:1", "cpu:2"),
        shares=(4, 2, 6),
    ),
    "mlp-replicas-zb": Case(
        lambda: models.mlp(*WIDE),
        trained(ADAMW, clip=0.5, microbatches=4),
        "zb-1f1b",
        FOUR,
        PAIRS,
    ),
    "cnn-hosts": Case(models.cnn, trained(MOMENTUM, microbatches=4), "2bw", ("cpu:0", "away"), wire="bf16"),
    "gpt-megatron": Case(
        models.gpt, trained(ADAMW, microbatches=4), "2bw", FOUR, PAIRS, mesh="tp=2", layouts=("preset:megatron",)
    ),
    "gpt-sequence": Case(
        models.gpt,
        trained(clip=1.0),
        devices=FOUR,
        groups=(" ".join(FOUR),),
        mesh="dp=2,tp=2",
        layouts=("preset:sequence",),
    ),
    "mlp-zero-1": Case(lambda: models.mlp(*WIDE), trained(ADAMW, clip=1.0), "2bw", FOUR, PAIRS, mesh="dp=2", zero=1),
    "mlp-zero-3": Case(lambda: models.mlp(*WIDE), trained(ADAMW), devices=FOUR, groups=PAIRS, mesh="dp=2", zero=3),
    "mlp-uneven": Case(
        lambda: models.mlp(*WIDE),
        trained(ADAMW),
        "zb-1f1b",
        FOUR[:3],
        (" ".join(FOUR[:3]),),
        mesh="tp=3",
        layouts=("fc1.weight=[_,/tp]", "fc2.weight=[/tp,_]"),
    ),
    "gpt-little-memory": Case(lambda: models.gpt(4), trained(ADAMW, microbatches=4), devices=SMALL),
    # Families from ONNX.
    "cnn-inference": Case(models.cnn, None, "forward", FOUR[:3]),
    "parallel-inference": Case(models.parallel, None, "forward", FOUR[:1]),
    "resnet-1f1b": Case(models.resnet, trained(MOMENTUM), devices=FOUR[:3]),
    "resnet-bf16": Case(models.resnet, trained(), "2bw", precision="bf16"),
    "gpt-2bw": Case(lambda: models.gpt(), trained(ADAMW, microbatches=4), "2bw"),
    "gpt-recomputed": Case(
        lambda: models.gpt(), trained(ADAMW, microbatches=4), "zb-1f1b", recompute="all", precision="bf16", wire="f16"
    ),
    "gpt-packs": Case(lambda: models.gpt(4), trained(ADAMW, microbatches=4), "interleaved", packs=2),
    "gpt-packs-2bw": Case(lambda: models.gpt(4), trained(ADAMW, clip=1.0, microbatches=4), "interleaved-2bw", packs=2),
    "gpt-packs-recomputed": Case(
        lambda: models.gpt(4), trained(ADAMW, microbatches=4), "zb-v", packs=2, recompute="all"
    ),
    "tied-gpt-update-on": Case(
        models.tied_gpt, trained(ADAMW, clip=1.0, microbatches=4), "2bw", PAIR, update_on=("cpu:3",)
    ),
    "gpt-packs-offload": Case(
        lambda: models.gpt(4), trained(ADAMW, microbatches=4), "interleaved", packs=2, offload="state"
    ),
    "gpt-wrapped": Case(lambda: models.gpt(4), trained(ADAMW, microbatches=4), "wrap", packs=3, offload="weights"),
    "gpt-wrapped-2bw": Case(lambda: models.gpt(4), trained(microbatches=4), "wrap-2bw", packs=3, offload="weights"),
    "gpt-f16": Case(lambda: models.gpt(), trained(ADAMW), "gpipe", precision="f16"),
    "gpt-inference": Case(lambda: models.gpt(), None, "forward", precision="bf16"),
    "gpt-cuda": Case(lambda: models.gpt(), trained(ADAMW, microbatches=4), "2bw", GPUS, library="torch"),
    "gpt-cuda-own": Case(lambda: models.gpt(), trained(), "1f1b", GPUS, library="none", precision="bf16"),
    "bert-mixed": Case(models.bert, trained(ADAMW), "zb-1f1b", ("cpu:0", "cuda:0"), library="torch"),
    "bert-1f1b": Case(models.bert, trained(ADAMW, microbatches=4), devices=FOUR, recompute="all"),
    "rich-1f1b": Case(models.rich, trained(loss="mse")),
    "quantised-inference": Case(models.quantised, None, "forward"),
    "mlp-int8": Case(lambda: models.mlp(64, 64, 64, 10), None, "forward", weights=8),
    "mlp-bounded": Case(lambda: models.mlp(*WIDE), None, "forward", bounded=True),
    "control-1f1b": Case(models.control, trained(loss="mse")),
    "gru-1f1b": Case(models.recurrent, trained(ADAMW)),
    # Families from torch.
    "tied-gpt-2bw": Case(models.tied_gpt, trained(ADAMW, microbatches=4), "2bw"),
    "tied-gpt-zb-1f1b": Case(models.tied_gpt, trained(ADAMW, clip=1.0, microbatches=3), "zb-1f1b", precision="bf16"),
    "conv-statistics": Case(lambda: models.convolutions(True), trained(MOMENTUM, microbatches=3), "2bw"),
    "encoder-dropout": Case(models.encoder, trained(ADAMW, seed=7, microbatches=3), "eager-2bw"),
    "llama-1f1b": Case(models.llama, trained(ps.Muon()), devices=FOUR[:3], precision="bf16"),
    "t5-1f1b": Case(models.translator, trained(ADAMW), devices=FOUR[:3]),
    "moe-gpipe": Case(models.experts, trained(ADAMW), "gpipe"),
    "vit-2bw": Case(models.patches, trained(ADAMW), "2bw", recompute="all"),
    "branches-1f1b": Case(models.branches, trained(microbatches=4)),
    "unet-1f1b": Case(lambda: models.of_family("unet"), trained(ADAMW, loss="mse"), devices=FOUR[:3]),
    "lstm-zb-1f1b": Case(lambda: models.of_family("lstm"), trained(), "zb-1f1b"),
    "dlrm-2bw": Case(lambda: models.of_family("dlrm"), trained(ps.Adagrad(), loss="mse"), "2bw"),
    "gnn-1f1b": Case(lambda: models.of_family("gnn"), trained(ADAMW, microbatches=1)),
}


class Steps:
    """Keeps what every pass made, in order."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Module]] = []

    def begin(self, module: Module, rest: str) -> None:
        self.found.append(("input", module))

    def passed(self, event: Event, name: str, before: Module, after: Module) -> None:
        self.found.append((str(event.call), after))

    def failed(self, module: Module, call: Call, error: Exception) -> None:
        """The error says it all."""


def modules_of(case: Case) -> Iterator[tuple[str, Module]]:
    """What goes into the first pass, as `input`, and what each pass made, by its call."""
    module, calls = _start(case)
    steps = Steps()
    run_passes(module, calls, PASSES, dump=steps)
    yield from steps.found


def with_bound(calls: list[Call], module: Module) -> list[Call]:
    """The passes with one before the cut that lets the first dimension of the first input and output change."""
    x, y = module.inputs[0], module.outputs[0]
    bound = Call("bound", BoundOptions("n", x.type.dims[0], (f"%{x.name}[0]",), (f"%{y}[0]",), rows=True))
    cut = next(i for i, call in enumerate(calls) if call.name == "partition")
    return [*calls[:cut], bound, *calls[cut:]]


def _start(case: Case) -> tuple[Module, list[Call]]:
    model = case.make()
    every = Cluster.load(DEVICES)
    chosen = tuple(every.device(name) for name in (*case.devices, *case.update_on))
    links = tuple(link for link in every.links if {link.a, link.b} <= set(case.devices))
    spaces = (Space("disk"),) if case.offload != "none" else ()
    module = model.module.but(cluster=replace(every, devices=chosen, links=links, spaces=spaces))
    stages = len(case.groups) or len(case.devices)
    cuts: dict[str, Attr] = {"stages": stages, "devices": case.groups, "shares": case.shares}
    if case.training is None:
        module = at_rest(module, pure=model.imported.structure is not None)
        calls = inference_pipeline(
            cuts,
            PipelineOptions(
                microbatches=3,
                precision=case.precision,
                library=case.library,
                shares=case.shares,
                wire=case.wire,
                weights=case.weights,
            ),
        )
        return module, with_bound(calls, module) if case.bounded else calls
    module = attach_loss(module, case.training, model.imported.names)
    options = PipelineOptions(
        schedule=case.schedule,
        microbatches=case.training.microbatches,
        precision=case.precision,
        recompute=case.recompute,
        wire=case.wire,
        shares=case.shares,
        library=case.library,
        guard=case.training.guard_options(),
        mesh=case.mesh,
        layouts=case.layouts,
        zero=case.zero,
        offload=case.offload,
        update_on=case.update_on,
        packs=case.packs,
    )
    return module, training_pipeline(case.training.pass_options(), cuts, options)
