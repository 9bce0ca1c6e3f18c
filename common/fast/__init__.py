"""All that is there for speed alone. Without this folder and the lines that name it, results differ by rounding only.

modules: which convolutions and residual blocks run by `kernels`
kernels, kernels.cpp, gpu_kernels: the kernels for a CPU in C++ and for a GPU in Triton
graphs: torch.compile, and CUDA graphs of acting and of the encoders' passes
memory: malloc keeps what it frees
"""

from torch import nn

from common import InputError
from common.fast.graphs import compile_encoders, record_calls
from common.fast.memory import keep_freed_memory
from common.fast.modules import use_kernels


def accelerate(agent: nn.Module, mode: str) -> None:
    """Make an agent faster, in place. Call this once, before any threads; a second call changes nothing.
    - "eager": on a CPU our kernels run the encoders. A note on stderr names the convolutions that they do not run.
    - "cudagraphs": on a GPU they do so in bfloat16. Acting and the encoders' two passes are recorded and replayed.
    - "compile": torch.compile compiles the encoders that it can. On a GPU acting is recorded, too.
    - "auto": "cudagraphs" on a GPU, else "eager"."""
    devices = {parameter.device.type for parameter in agent.parameters()}
    if mode == "cudagraphs" and devices != {"cuda"}:
        raise InputError("--accelerate cudagraphs needs a CUDA GPU: use eager or compile.")
    if devices == {"cpu"}:
        keep_freed_memory()
    if mode == "auto":
        mode = "cudagraphs" if devices == {"cuda"} else "eager"
    if mode == "compile":
        compile_encoders(agent)
    elif devices == {"cpu" if mode == "eager" else "cuda"}:
        use_kernels(agent)
    if mode != "eager" and devices == {"cuda"}:
        record_calls(agent, mode)
