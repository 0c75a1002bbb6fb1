"""What a benchmark ran on, and how much memory a process took."""

import ctypes
import gc
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specdraft.target import computes_in_bfloat16

DTYPE = "bfloat16" if computes_in_bfloat16(torch.device("cpu")) else "float32"
"""On a CPU without bfloat16 instructions float32 is several times faster."""


def facts(dtype: str) -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "load": [round(load, 1) for load in os.getloadavg()],
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} CPUs"
    return f"{platform.machine()}, {os.cpu_count()} CPUs"


def resident() -> int:
    """Bytes in memory now, after what was freed has been given back; the peak counts from here on. Linux alone."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_resident() -> int:
    """The most bytes in memory since `resident` was called."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
