"""The settings of reading, training, planning and compiling, each of them once: name, default, check and help.

`plan` runs the passes as its settings say. `search` lets the planner choose what they leave open for batches of a size.
`build` makes code. This module imports nothing heavy, as the command line reads its flags from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ir.schedule_names import ALL_SYNCHRONOUS, PACKED, TRAINING
from penstock.ir.training.rates import EXAMPLES
from penstock.support.settings import LEVEL, POSITIVE, required, setting, shared

FLOATS = ("f32", "bf16", "f16")
# What stands in front of the path of a folder of Hugging Face.
FOLDER_PREFIX = "hf:"
# The bits of weights by their names.
WEIGHTS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}

# What may be in another memory space between its uses.
OFFLOADS = ("none", "state", "activations", "both", "weights", "all")
# The setting that leaves it to prices: the fastest of these that fits.
AUTO = "auto"


@dataclass(frozen=True)
class PlanOptions:
    """Settings of a plan. `stages` 0 means one per device. `devices` names those of each stage, in place of `replicas`;
    `shares` are how many microbatches each of them runs. A `precision` that is not given is that of the training
    settings."""

    schedule: str = setting(
        "1f1b",
        "default: 1f1b, which equals plain training; with --batch the fastest that does; auto, with --batch: the "
        "fastest of all",
        choices=(*TRAINING, *PACKED, "auto"),
    )
    stages: int = setting(0, "pipeline stages (default: as many as the devices make)", check=POSITIVE, shown="N")
    packs: int = setting(
        1,
        f"stages on each device, for --schedule {', '.join(PACKED[:-1])} or {PACKED[-1]}: a smaller bubble, more in "
        "flight (default: 1)",
        check=POSITIVE,
        shown="N",
        rare=True,
    )
    split_at: Sequence[str] = setting(
        (), "start a new stage at this node, value or module instead of searching", shown="NODE", many=True, rare=True
    )
    split_by: str = setting(
        "operation",
        "start stages at any operation, or only between modules of the model, such as blocks (default: operation)",
        choices=("operation", "module"),
        rare=True,
    )
    pin: Sequence[str] = setting(
        (), "keep this node, value or module on this stage", shown="NAME=STAGE", many=True, rare=True
    )
    microbatches: int = setting(1, "microbatches per batch (default: 1)", check=POSITIVE, shown="M")
    replicas: int = setting(
        1,
        "devices per stage: they share the microbatches of a batch out among them, faster ones take more (default: 1; "
        "with --batch, the most of one stage, by default any number)",
        check=POSITIVE,
        shown="N",
        rare=True,
    )
    devices: Sequence[Sequence[str]] = ()
    shares: Sequence[Sequence[int]] = ()
    mesh: str = setting(
        "",
        "axes of each stage's devices, such as dp=2,tp=2: dp deals out microbatches, others split tensors",
        shown="AXIS=N,...",
    )
    shard: Sequence[str] = setting(
        (),
        "layouts on the mesh: auto, none, preset:NAME, widths, FILE.toml, or 'h.*.weight=[_,/tp]' (docs/sharding.md)",
        shown="LAYOUT",
        many=True,
    )
    zero: int = setting(
        0,
        "what replicas hold a part of, for less memory: 1 optimiser state, 2 also gradients, 3 also weights; 1 moves "
        "no more bytes, 2 and 3 exchange in every microbatch (default: 0)",
        check=LEVEL,
        shown="LEVEL",
        rare=True,
    )
    precision: str | None = setting(
        None,
        "element type of activations and products; weights, sums and losses stay f32; with f16 the loss is scaled in "
        "training (default: f32)",
        choices=FLOATS,
    )
    weights: str = setting(
        "f32",
        "element type of weights of products and lookups, for inference (default: f32)",
        choices=tuple(WEIGHTS),
    )
    recompute: str = setting(
        "auto",
        "what is computed again in the backward pass instead of saved: what the memory of the devices asks for, "
        "nothing, or all (default: auto)",
        choices=("auto", "none", "all"),
        rare=True,
    )
    offload: str = setting(
        "none",
        "what is in another memory space between its uses: nothing, optimiser state, of which a few chunks are on the "
        "device at once, what forwards saved until the backward (activations), both, weights with gradients and state "
        "of all stages of a device but two (weights), or all; auto: the fastest of these that fits (default: none)",
        choices=(*OFFLOADS, AUTO),
        rare=True,
    )
    spill: str = setting(
        "",
        "with --offload: the space, a [[space]] of the cluster file or a folder for files (default: the first that a "
        "device reaches; else the folder for temporary files, and for a GPU memory of its host)",
        shown="SPACE",
        rare=True,
    )
    update_on: str = setting(
        "",
        "devices that run updates and no stage, a CPU of the host for each: weights are updated there, and optimiser "
        "state is there alone; under 2bw beside the next batch (default: the device of each stage)",
        shown="DEVICE,...",
        rare=True,
    )
    cuda_libraries: str = setting(
        "torch",
        "who computes products, convolutions and attention on GPUs: the vendor's libraries through torch, or kernels "
        "of ours (default: torch)",
        choices=("torch", "none"),
        rare=True,
    )
    wire: str = setting(
        "f32",
        "element type of float32 activations and gradients on their way between stages: half the bytes for a rounding "
        "at each boundary (default: f32)",
        choices=FLOATS,
        rare=True,
    )
    objective: str = setting(
        "",
        "for inference: the planner chooses stages and devices, for the least time of one microbatch alone or for most "
        "of them per second (default: all devices, in order; of --workload: throughput)",
        choices=("throughput", "latency"),
        rare=True,
    )
    hints: bool = setting(
        True,
        "placement hints in the model (layouts of tensors, pipeline stages, layer_ann): follow them where they fit, or "
        "ignore them (default: use)",
        words={"use": True, "ignore": False},
        rare=True,
    )


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search for the best plan of batches of `batch` samples.

    `sizes` are the samples per microbatch to choose from, None for those of the model as it is. The fastest of
    `schedules` is taken. `replicas` is the most devices of a stage, 0 for any number. Where nothing fits, the error
    says what would, if that shall be `explained`, which takes longer than finding out that nothing fits.
    """

    batch: int = required(
        "samples per update: the planner then chooses stages, their devices and shares, microbatches, schedule and "
        "recomputation; a symbolic first dimension of the inputs is left to it as well",
        check=POSITIVE,
        shown="N",
    )
    sizes: Sequence[int | None] = (None,)
    schedules: Sequence[str] = ALL_SYNCHRONOUS
    recompute: str = shared(PlanOptions, "recompute")
    replicas: int = shared(PlanOptions, "replicas", 0)
    precision: str | None = shared(PlanOptions, "precision")
    cuda_libraries: str = shared(PlanOptions, "cuda_libraries")
    wire: str = shared(PlanOptions, "wire")
    zero: int = shared(PlanOptions, "zero")
    offload: str = shared(PlanOptions, "offload")
    spill: str = shared(PlanOptions, "spill")
    update_on: str = shared(PlanOptions, "update_on")
    mesh: str = shared(PlanOptions, "mesh")
    shard: Sequence[str] = shared(PlanOptions, "shard")
    explained: bool = True


@dataclass(frozen=True)
class ReadingOptions:
    """Settings of reading a model file: sizes and values of inputs, and which parameters are trained."""

    dim: Sequence[str] = setting(
        (),
        "bind a symbolic dimension (batch is one microbatch), or bound it: 'seq<=512' serves all sizes up to it",
        shown="NAME=INT",
        many=True,
    )
    known: Sequence[str] = setting(
        (),
        "bind an input to numbers between commas or to FILE.npy, for models that take shapes, axes or counts as inputs",
        shown="NAME=VALUES",
        many=True,
        rare=True,
    )
    frozen: str | None = setting(None, "parameters that are not trained", shown="REGEX", rare=True)
    trained: str | None = setting(
        None, "initializers that are trained although they look like constants", shown="REGEX", rare=True
    )


@dataclass(frozen=True)
class TrainingOptions:
    """Settings of a training, over those of the file `train`. What is None is left to the file or to the defaults."""

    train: str | None = setting(None, "training settings (TOML); the flags below override it", shown="FILE")
    loss: str | None = setting(None, "cross_entropy or mse on the first output, or output:NAME", shown="L")
    optimizer: str | None = setting(
        None,
        "sgd, momentum, adam, adamw, adagrad, lion or muon, with settings e.g. 'momentum{nesterov=true}' "
        "(default: sgd)",
        shown="O",
    )
    lr: float | None = setting(None, "learning rate", shown="X", read=float)
    lr_schedule: str | None = setting(
        None, f"how the learning rate changes, e.g. {EXAMPLES} (default: constant)", shown="R", rare=True
    )
    group: Sequence[str] = setting(
        (),
        "parameters whose name matches a pattern, and what is different for them: kind, lr (a factor), weight_decay, "
        "frozen; e.g. 'embed{kind=adamw,weight_decay=0}'; the first that matches counts",
        shown="G",
        many=True,
        rare=True,
    )
    weight_decay: float | None = setting(
        None, "decay of the weights, of optimisers that have one", shown="X", read=float, rare=True
    )
    clip: float | None = setting(
        None, "scale the gradient down to this norm where it is longer", shown="X", read=float, rare=True
    )
    skip_nonfinite: bool = setting(
        False,
        "leave out updates whose gradient is infinite or nan (with --clip and in f16 that is done in any case)",
        rare=True,
    )


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a bundle that generates text. `context` None is that of the model, but not more than 4096."""

    generate: bool = setting(False, "make a bundle for text, of hf:FOLDER or a decoder")
    context: int | None = setting(
        None, "tokens of a prompt with its text (default: the model's own, at most 4096)", check=POSITIVE, shown="N"
    )
    sequences: int = setting(
        8, "texts at once; caches have room for all of them (default: 8)", check=POSITIVE, shown="N", rare=True
    )
    cache: str = setting(
        "f32", "element type of keys and values in caches (default: f32)", choices=("f32", "bf16"), rare=True
    )
    logits: bool = setting(False, "give the logits beside the tokens, to compare them", rare=True)


@dataclass(frozen=True)
class BuildOptions:
    """Settings of making code. `jobs` is the most processes to compile with: one per core if not given."""

    backend: str = setting("tvm", "code generator (default: tvm)", choices=("tvm", "numpy"), rare=True)
    target: str = setting(
        "host", "instruction set to compile for, e.g. host, x86-64-v3 (default: host)", shown="NAME", rare=True
    )
    jobs: int | None = setting(
        None, "processes to compile with (default: one per core)", check=POSITIVE, shown="N", rare=True
    )
    with_runtime: bool = setting(
        False, "put TVM's runtime library into the bundle (4 MB), for hosts where TVM is not installed", rare=True
    )
