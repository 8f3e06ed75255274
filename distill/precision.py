"""Whether this processor trains faster in bfloat16."""

import torch

_NATIVE = ("amx_bf16", "avx512_bf16", "bf16")


def native_bfloat16() -> bool:
    """True where the processor multiplies bfloat16 in hardware.

    Elsewhere torch emulates it, several times slower than float32. The answer depends on the
    machine alone, so a job repeated there takes the same steps.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in _NATIVE)
