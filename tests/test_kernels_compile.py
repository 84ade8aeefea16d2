"""Every kernel compiles for a Hopper GPU, on a machine that has none.

The interpreter accepts what the compiler refuses (types that change in a loop, shapes that are not
powers of two). This test records each launch of each operation on CPU tensors, uninterpreted, and
compiles it for sm_90. It needs a process of its own: TRITON_INTERPRET is read once.
"""

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
KERNELS = {
    "_attend_kernel", "_join_kernel", "_loss_grad_kernel", "_loss_kernel",
    "_tiles_kernel", "_topk_merge_kernel",
    "_topk_tiles_kernel", "_walk_kernel",
}  # fmt: skip
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert set(sizes) == KERNELS


def _compile(kernel: Any, args: tuple, options: dict) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constants, attributes = {}, {}, {}
    parameters = inspect.signature(kernel.fn).parameters.items()
    for i, ((name, parameter), value) in enumerate(zip(parameters, args, strict=True)):
        if "constexpr" in str(parameter.annotation) or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _launch_everything() -> None:
    from minitlt import kernels_triton as KT
    from minitlt import kernels_triton_model as KM

    # Sizes of 1 are constants to the compiler, which is stricter about those than about values.
    for B, T, V, D in ((8, 5, 151_936, 128), (1, 1, 97, 12)):
        logits = torch.empty(B, T, V, dtype=torch.bfloat16)
        longs = torch.zeros(B, T, dtype=torch.int64)
        row, temps = longs[:, 0].contiguous(), torch.ones(B)
        args = (logits, row, row, temps, longs, longs)
        KT.coupled_verify_triton(*args)
        KT.coupled_verify_triton(*args, limits_B=row, stop_ids=(1, 2)[:B])
        KT.coupled_verify_triton(
            *args,
            sample_logits_BTV=torch.empty(B, T, V),
            thresholds_BT=torch.zeros(B, T),
            entropy=True,
        )
        half = -(-V // 2)
        KT.gumbel_topk_triton(logits[:, 0, :half], row, row, temps, 1, torch.arange(half))
        KT.gumbel_topk_triton(logits[:, 0], row, row, temps, min(V, 8))
        for dtype in (torch.bfloat16, torch.float32):
            q, k = torch.empty(B, B * 4, T, D, dtype=dtype), torch.empty(B, B, 256, D, dtype=dtype)
            KM.tree_attention_triton(q, k, k, row, longs, 0.1)
            KM.tree_attention_triton(q[:, :B], k, k, row, longs, 0.1)
            x = torch.empty(B, V, dtype=dtype, requires_grad=True)
            KM.draft_loss_triton(x, x.detach()).loss_N.sum().backward()


if __name__ == "__main__":
    from triton.runtime.jit import JITFunction

    from minitlt import kernels_triton

    ptx_sizes: dict[str, int] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = _compile(kernel, args, options)
        assert compiled.asm["cubin"]
        ptx_sizes[kernel.fn.__name__] = len(compiled.asm["ptx"])

    JITFunction.run = record
    kernels_triton.scratch = lambda *shape, dtype, device: torch.zeros(shape, dtype=dtype)
    _launch_everything()
    print(json.dumps(ptx_sizes))
