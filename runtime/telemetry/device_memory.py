"""The memory of a rank's GPU that is in use: by this process and by all others.

In: the GPU. Out: the most bytes at any look, and words for an error. The pools of torch and of TVM keep what they got.
So a look at the end of each batch sees the most that they had.
"""

from __future__ import annotations

import torch

from penstock.support.words import shown_bytes


class DeviceMemory:
    """The memory of one GPU. `most` is the largest number of bytes in use so far; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most = 0

    def look(self) -> None:
        """See what is in use."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.most = max(self.most, total - free)


def device_without_memory(error: BaseException, device: torch.device | None) -> str:
    """Describe the memory of the GPU that an error of the system's memory is about; nothing if that is no GPU's."""
    if "CUDA" not in str(error) or not torch.cuda.is_available():
        return ""
    gpu = torch.device("cuda", torch.cuda.current_device()) if device is None or device.type != "cuda" else device
    free, total = torch.cuda.mem_get_info(gpu)
    return f"GPU {gpu} gave no more memory: {shown_bytes(total - free)} of {shown_bytes(total)} are in use"
