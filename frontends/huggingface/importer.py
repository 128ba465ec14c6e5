"""The importer of Hugging Face folders: a folder and sizes of turns in, a module for each number of tokens out.

The module is exported once, with the tokens of a turn as a dynamic dimension, which is bound to a number for each
module. Variables have the names of the module's state dict, and elements that are mapped from the folder's files when
they are read. Tied weights are one variable. Caches are `layers.N.keys` and `layers.N.values`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.imported import Imported
from penstock.frontends.quantised.weight import QuantisedWeight
from penstock.frontends.torch.importer import ProgramImporter
from penstock.frontends.torch.node import KnownElements, TorchBuilder, TorchWeight
from penstock.frontends.torch.source import decomposed
from penstock.ir.graph import Module, Var
from penstock.ir.ladder.bounds import Bounded
from penstock.ir.text import print_module
from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .export import BY_TOKEN, TurnShape, export_decoder, make_module
from .families import names_in_files
from .folder import ModelFolder
from .safetensors_file import StoredTensor
from .stored_codes import check_method, read_codes, with_codes


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Return the positions that the model was made for, None where its config does not say."""
    sizes = [config.get(name) for name in ("max_position_embeddings", "n_positions")]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def import_folder(folder: ModelFolder, sizes: DecoderSizes) -> dict[int, Imported]:
    """Import a decoder. Return it for each number of tokens of a turn."""
    where = str(folder.path)
    longest = longest_context(folder.config)
    if longest is not None and sizes.context > longest:
        raise UsageError(
            f"a context of {sizes.context} positions, but the model was made for {longest}",
            where=where,
            hint=f"--context {longest} is the longest",
        )
    check_method(folder)
    module = make_module(folder.config, where)
    names, codes = _stored_names(module, folder)
    imported: dict[int, Imported] = {}
    programs: dict[int, Any] = {}
    digest = folder.digest()
    for tokens in sizes.rungs:
        sequences = min(tokens, sizes.sequences)
        if sequences not in programs:
            shape = TurnShape(sequences, sizes.blocks_each, sizes.blocks)
            program = export_decoder(module, shape, max(sizes.rungs), sizes.logits, where)
            programs[sequences] = decomposed(program, where)
        one = _import(programs[sequences], tokens, sizes.cache, names, folder, digest)
        imported[tokens] = with_codes(one, codes, where)
    return imported


def _import(
    program: Any,
    tokens: int,
    cache: str,
    names: Mapping[str, StoredTensor],
    folder: ModelFolder,
    digest: str,
) -> Imported:
    importer = FolderImporter(program, folder.path.name or folder.family, {"turn_tokens.0": tokens})
    importer.tensors, importer.digest = names, digest
    importer.builder.cache_dtype = cache
    imported = importer.run()
    bound = Bounded("tokens", tokens, False, tuple((f"turn.{name}", 0) for name in BY_TOKEN))
    return replace(imported, module=imported.module.but(bounds=(bound,)))


class FolderBuilder(TorchBuilder):
    """A graph whose parameters lie in the files of a folder."""

    trains = False

    def elements(self, weight: TorchWeight) -> np.ndarray:
        """Return a placeholder: the importer knows where the elements are."""
        return np.broadcast_to(np.zeros((), np.float32), tuple(weight.tensor.shape))


class FolderImporter(ProgramImporter):
    """The import of an exported decoder, with weights by their places in the folder."""

    tensors: Mapping[str, StoredTensor]
    digest: str

    def __init__(self, program: Any, where: str, dims: Mapping[str, int]) -> None:
        super().__init__(program, where, dims, FolderBuilder)

    def input_name(self, name: str) -> str:
        return name.replace("_", ".", 1)

    def take_inputs(self) -> None:
        """Take the inputs under the names that they have in a turn, which are those outside, too."""
        super().take_inputs()
        self.spelled.clear()

    def take_state(self, frozen: re.Pattern[str] | None) -> None:
        """Import parameters as variables, and buffers as known elements."""
        firsts: dict[int, TorchWeight] = {}
        for spec in self.program.graph_signature.input_specs:
            name = str(spec.target)
            if name not in self.state:
                continue
            tensor, node = self.state[name], self.placeholders[spec.arg.name]
            if isinstance(tensor, torch.nn.Parameter):
                weight = firsts.setdefault(id(tensor), TorchWeight(self.builder.names[name], tensor))
                self.builder.env[node] = weight
            else:
                self.builder.env[node] = KnownElements(self.builder.names[name], tensor.detach())

    def state_of(self, variables: Mapping[str, Var]) -> None:
        """Return nothing: a folder is not written back."""

    def source_hash(self, module: Module, weights: dict[str, np.ndarray]) -> str:
        """Put the folder's tensors in place of placeholders, and hash what was read."""
        for name in weights:
            if name in self.tensors:
                weights[name] = self.tensors[name]  # type: ignore[assignment]
        return hashlib.sha256(f"{print_module(module)}{self.digest}".encode()).hexdigest()


def _stored_names(
    module: torch.nn.Module, folder: ModelFolder
) -> tuple[dict[str, StoredTensor], dict[str, QuantisedWeight]]:
    """Find the tensor of each parameter, or the numbers of one that is stored in few bits.

    One error lists those that are missing or have another shape.
    """
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    placed: dict[int, tuple[list[str], torch.nn.Parameter]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        placed.setdefault(id(param), ([], param))[0].append(name)
    names: dict[str, StoredTensor] = {}
    codes: dict[str, QuantisedWeight] = {}
    problems = []
    for same, param in placed.values():
        spelled = [other for name in same for other in names_in_files(folder.family, name, prefix)]
        tensor = next((folder.tensors[name] for name in spelled if name in folder.tensors), None)
        weight = read_codes(folder, spelled) if tensor is None else None
        if weight is not None:
            columns = weight.q.shape[1] * (8 // weight.bits)
            if (len(weight.q), columns) == tuple(param.shape):
                codes |= dict.fromkeys(same, weight)
            else:
                problems.append(f"{same[0]}: [{len(weight.q)}, {columns}] in the files, expected {list(param.shape)}")
        elif tensor is None:
            problems.append(f"{same[0]}: not in the files")
        elif tensor.shape != tuple(param.shape):
            problems.append(f"{same[0]}: {list(tensor.shape)} in the files, expected {list(param.shape)}")
        elif tensor.stored not in ("f32", "f16", "bf16"):
            problems.append(f"{same[0]}: elements of type {tensor.stored}, expected f32, f16 or bf16")
        else:
            names |= dict.fromkeys(same, replace(tensor, as_dtype="f32"))
    if problems:
        raise UsageError("the weights do not fit config.json:" + itemised(problems), where=str(folder.path))
    return names, codes
