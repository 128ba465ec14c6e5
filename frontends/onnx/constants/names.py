"""Names that say what a tensor is.

    says_buffer       the last part of the name is one that programs give to what is not trained
    says_parameter    the last part is one that frameworks give to parameters
    made_by_exporter  the name was made up while the file was written: onnx::Mul_33, val_7, /layer/Constant_output_0

The last part is what stands behind the last `.`, `/` or `:`, without the output number that TensorFlow adds.
"""

from __future__ import annotations

import re

_PARTS = re.compile(r"[./:]+")
# What TensorFlow's exporters add behind the name of a variable.
_READ = re.compile(r"(/ReadVariableOp(_\d+)?|/read)?(:\d+)?$")

_BUFFER = re.compile(
    r"""(\w*_)?(
        running_mean | running_var | moving_mean | moving_variance | num_batches_tracked
      | position_ids | inv_freq | freqs_cis | (cos|sin)_cached | (cos|sin)_cache
      | mel_basis | mel_filters | mel_fb | melW | filterbank | filter_bank | fbank | fb
      | window | hann_window | anchors | anchor_grid | anchor_points | priors
      | mask | causal_mask | tril | triu | buffer | eps | epsilon
      | pixel_mean | pixel_std | image_mean | image_std
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"""(\w*_)?(
        weights? | bias | biases | kernel | scale | gamma | beta | alpha | slope | gain | temperature | clip_val | w | b
    )(_g|_v|_orig)?""",
    re.VERBOSE | re.IGNORECASE,
)
_MADE = re.compile(
    r"""\d+ | onnx::\w+ | .*_output_\d+ | Constant_\d+ | ortshared_\w+ | const_fold_opt__\d+
      | (val|const|constant|CONST|tensor|lifted_tensor|_tensor_constant|scalar_tensor|_to_copy)
        (_default)?(_\d+)?(_cast)?
    """,
    re.VERBOSE,
)
# A path of attributes, as in the state dict of torch.
_PATH = re.compile(r"\w+(\.\w+)*")


def _last(name: str) -> str:
    return _PARTS.split(_READ.sub("", name))[-1]


def says_buffer(name: str) -> bool:
    return _BUFFER.fullmatch(_last(name)) is not None


def says_parameter(name: str) -> bool:
    return not made_by_exporter(name) and _PARAMETER.fullmatch(_last(name)) is not None


def made_by_exporter(name: str) -> bool:
    return _MADE.fullmatch(name) is not None


def is_path(name: str) -> bool:
    """Return whether a name may be one of a state dict."""
    return _PATH.fullmatch(name) is not None and not made_by_exporter(name)
