"""The families of models that can be imported, by `model_type` of their config.json.

A family is here once its logits and its text were compared with those of transformers. Others are refused by name, also
those that would export: attention of their own (ALiBi, sinks, caches of another kind) would be left out silently.
"""

from __future__ import annotations

from penstock.support.errors import UnsupportedModel

FAMILIES = (
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
)
# Names of families that users ask for, and why they cannot be had.
_REASONS = {
    "": "config.json names no model_type",
    "bloom": "its attention adds a bias that grows with distance (ALiBi)",
    "falcon": "its attention does not go through the common interface of transformers",
    "gpt_oss": "its attention has sinks",
}
# Names in files that differ from those of the module, by what they begin with.
_SPELLED = {"gpt_neox": {"lm_head.": "embed_out."}}


def names_in_files(family: str, name: str, base: str) -> list[str]:
    """Return the names under which files may hold a parameter. Files of the decoder alone lack `base`."""
    spelled = [theirs + name.removeprefix(ours) for ours, theirs in _SPELLED.get(family, {}).items() if ours in name]
    return [name, name.removeprefix(base), *spelled]


def check_family(family: str, where: str) -> None:
    """Raise UnsupportedModel unless the family is one of those that can be imported."""
    if family in FAMILIES:
        return
    reason = f": {_REASONS[family]}" if family in _REASONS else ""
    raise UnsupportedModel(
        f"models of the family {family!r} cannot be imported{reason}",
        where=where,
        hint=f"the families are {', '.join(FAMILIES)}",
    )
