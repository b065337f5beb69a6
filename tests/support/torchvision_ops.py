"""torchvision, timm and open_clip beside the CPU build of torch; torchao, which lies in the same folder.

PyPI's torchvision is built for the CUDA build: its compiled operators do not load beside the CPU build that the
lock file names, and then its import fails, and transformers' with it.  So `make test` installs it into a folder of
its own, and the tests that want it call `enable()`: the folder joins the path, and the operators that torchvision
describes at its import are declared without a kernel.  None of the models under test uses them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "beside"
_declared: list[torch.library.Library] = []


def enable() -> None:
    """Make `import torchvision` (timm, open_clip, torchao) work in this process; where it works anyhow, do nothing."""
    if _declared or "torchvision" in sys.modules:
        return
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    meta = FOLDER / "torchvision" / "_meta_registrations.py"
    if not meta.is_file():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(
        set(re.findall(r'(?:register_fake|register_meta)\("(?:torchvision::)?(\w+)"', meta.read_text()))
    ):
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)
