"""Speed of the kernels, each behind its own correctness gate.

    python benchmarks/kernels.py [--device cpu|cuda] [--seconds 1.0] [--out FILE]

For every operation that has a fast implementation on the device: (1) the gate compares it with the
definition on the very inputs that will be timed, and a failed gate means no number; (2) the median
time with 20/80 percentiles; (3) the bytes it must move, divided by the time, as a fraction of the
measured copy bandwidth (the ceiling); (4) the same work as a plain PyTorch sequence, and the
samplers of flashinfer and vLLM where they can be imported. On a CPU the question is another one:
which share of a batch-1 SmolLM2-135M decode step does verification take, on the same threads?
(The model has random weights: time does not depend on them, and nothing is downloaded.)

The last line of the output is one JSON object, which is also written to runs/, or to --out, as the
committed one was. Nothing timed here is to be trusted while other work runs on the machine.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _machine import RUNS, about
from _machine import device as default_device
from _machine import parser as options_of


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__file__, __doc__, "--seconds 0.5")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed per measurement")
    parser.add_argument("--out", type=Path, help="result file (default: in runs/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # before torch is loaded: --help is quick, and so is word of what is wrong

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minitlt import kernels as K  # noqa: E402

SEED = 0  # of the inputs, and of the model whose forward is timed


@dataclass
class Case:
    """One operation on one set of inputs."""

    name: str
    shape: str
    run: Callable[[], Any]
    gate: Callable[[], str]  # "" if the fast path equals the definition, else what differs
    torch_way: Callable[[], Any]
    num_bytes: int
    rivals: dict[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass
class Size:
    """Problem sizes: what a GPU server or a laptop sees."""

    vocab: int
    rows: int
    drafts: int
    draft_vocab: int
    loss_rows: int
    dtype: torch.dtype


GPU = Size(151_936, 64, 4, 32_000, 2048, torch.bfloat16)
CPU = Size(49_152, 8, 0, 8192, 256, torch.float32)


def differences(got: K.Verified, want: K.Verified) -> str:
    for name in ("tokens_BD", "num_emit_B", "nodes_BD"):
        if not torch.equal(getattr(got, name), getattr(want, name)):
            return f"{name} differ"
    gap = float((got.logprobs_BD - want.logprobs_BD).abs().max())
    return "" if gap < 1e-4 else f"logprobs differ by {gap:.1e}"


def close(got: Tensor, want: Tensor, tolerance: float) -> str:
    gap = float((got.float() - want.float()).abs().max())
    return "" if gap <= tolerance else f"largest difference {gap:.1e}"


def row_inputs(num: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    keys = torch.tensor([K.row_key(0, 0, i) for i in range(num)], device=device)
    return keys, torch.arange(num, device=device) + 100, torch.ones(num, device=device)


def coupled_case(size: Size, device: torch.device, gen: torch.Generator) -> Case:
    """Half of the rows have drafts that will all be accepted, half have drafts that will not."""
    nodes = size.drafts + 1
    logits = torch.randn(size.rows, nodes, size.vocab, generator=gen, device=device) * 3
    logits = logits.to(size.dtype)
    rows = row_inputs(size.rows, device)
    tokens = torch.zeros(size.rows, nodes, dtype=torch.int64, device=device)
    for node in range(size.drafts):
        top = K.gumbel_topk(logits[:, node], rows[0], rows[1] + node, rows[2], 1)
        tokens[::2, node + 1] = top.tokens_Nk[::2, 0]
    parents = torch.arange(-1, nodes - 1, device=device).repeat(size.rows, 1)
    args = (logits, *rows, tokens, parents)

    def torch_way() -> Tensor:
        """Log-softmax, exponential noise, argmax, gather, compare: what one writes by hand."""
        logp = (logits.float() / rows[2][:, None, None]).log_softmax(-1)
        noise = torch.empty_like(logp).exponential_(generator=gen)
        sampled = (logp - noise.log()).argmax(-1)
        kept = (sampled[:, :-1] == tokens[:, 1:]).long().cumprod(1).sum(1)
        return torch.cat([kept[:, None].float(), logp.gather(-1, sampled[..., None])[..., 0]], 1)

    shape = f"B={size.rows} K={size.drafts} V={size.vocab} {size.dtype}".replace("torch.", "")
    num_bytes = logits.numel() * logits.element_size()
    rivals: dict[str, Callable[[], Any]] = {}
    if device.type == "cuda" and find_spec("vllm"):
        from vllm.v1.sample.ops.topk_topp_sampler import random_sample

        flat = logits.flatten(0, 1)
        rivals["vllm random_sample"] = lambda: random_sample(flat.float().softmax(-1), {})
    return Case(
        "coupled_verify",
        shape,
        lambda: K.coupled_verify(*args),
        lambda: differences(K.coupled_verify(*args), K.coupled_verify_ref(*args)),
        torch_way,
        num_bytes,
        rivals,
    )


def topk_case(size: Size, device: torch.device, gen: torch.Generator) -> Case:
    logits = torch.randn(size.rows, size.draft_vocab, generator=gen, device=device) * 3
    logits = logits.to(size.dtype)
    args = (logits, *row_inputs(size.rows, device))
    ids = torch.arange(size.draft_vocab, device=device) * 3

    def gate() -> str:
        got, want = K.gumbel_topk(*args, 1, ids), K.gumbel_topk_ref(*args, 1, ids)
        return "" if torch.equal(got.tokens_Nk, want.tokens_Nk) else "tokens differ"

    def torch_way() -> Tensor:
        logp = logits.float().log_softmax(-1)
        best = (logp - torch.empty_like(logp).exponential_(generator=gen).log()).topk(1)
        return ids[best.indices]

    return Case(
        "gumbel_topk",
        f"N={size.rows} V={size.draft_vocab} k=1",
        lambda: K.gumbel_topk(*args, 1, ids),
        gate,
        torch_way,
        logits.numel() * logits.element_size(),
    )


def attention_case(size: Size, device: torch.device, gen: torch.Generator) -> Case:
    heads, kv_heads, width, length = 32, 8, 128, 2048
    nodes = size.drafts + 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device).to(size.dtype)

    q = random(size.rows, heads, nodes, width)
    k, v = random(size.rows, kv_heads, length, width), random(size.rows, kv_heads, length, width)
    lengths = torch.randint(length // 2, length - nodes, (size.rows,), generator=gen, device=device)
    bits = ((2 << torch.arange(nodes)) - 1).repeat(size.rows, 1).to(device)
    args = (q, k, v, lengths, bits, width**-0.5)
    place = torch.arange(length, device=device) - lengths[:, None, None]
    mask = (place <= torch.arange(nodes, device=device)[:, None])[:, None]

    def torch_way() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    read = int((lengths + nodes).sum()) * kv_heads * width * 2
    return Case(
        "tree_attention",
        f"B={size.rows} H={heads}/{kv_heads} T={nodes} D={width} L<={length}",
        lambda: K.tree_attention(*args),
        lambda: close(K.tree_attention(*args), K.tree_attention_ref(*args), 2e-2),
        torch_way,
        read * k.element_size(),
    )


def loss_case(size: Size, device: torch.device, gen: torch.Generator) -> Case:
    shape = (size.loss_rows, size.draft_vocab)
    logits = torch.randn(*shape, generator=gen, device=device).to(size.dtype).requires_grad_()
    teacher = (torch.randn(*shape, generator=gen, device=device) * 2).to(size.dtype)

    def both(loss: Callable[..., K.DraftLoss]) -> tuple[Tensor, Tensor]:
        value = loss(logits, teacher, "lk").loss_N.mean()
        return value.detach(), torch.autograd.grad(value, logits)[0]

    def gate() -> str:
        (a, grad_a), (b, grad_b) = both(K.draft_loss), both(K.draft_loss_ref)
        return close(a, b, 1e-4) or close(grad_a, grad_b, float(grad_b.float().abs().max()) * 0.02)

    return Case(
        "draft_loss",
        f"N={shape[0]} V={shape[1]} forward and backward",
        lambda: both(K.draft_loss),
        gate,
        lambda: both(K.draft_loss_ref),
        7 * logits.numel() * logits.element_size(),  # 2 x 2 reads forward, 2 reads and a write back
    )


def cases(device: torch.device) -> list[Case]:
    gen = torch.Generator(device=device).manual_seed(SEED)
    if device.type != "cuda":  # what has a CPU implementation of its own
        return [make(CPU, device, gen) for make in (coupled_case, topk_case, loss_case)]
    makers = [coupled_case, topk_case, attention_case, loss_case]
    return [make(GPU, device, gen) for make in makers]


def measure(run: Callable[[], Any], device: torch.device, seconds: float) -> list[float]:
    """Microseconds at the 20th, 50th and 80th percentile; the L2 cache is cold on a GPU."""
    if device.type == "cuda":
        from triton.testing import do_bench

        times = do_bench(run, rep=int(seconds * 1000), quantiles=[0.2, 0.5, 0.8])
        return [1000 * t for t in times]
    run()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 7:
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    samples.sort()
    return [1e6 * samples[int(len(samples) * share)] for share in (0.2, 0.5, 0.8)]


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes read and written per second by a plain copy that fits no cache."""
    size = (512 if device.type == "cuda" else 128) << 20
    source = torch.zeros(size // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * size / (measure(lambda: target.copy_(source), device, seconds)[1] * 1e-6)


def run_case(case: Case, device: torch.device, bandwidth: float, seconds: float) -> dict[str, Any]:
    reason = case.gate()
    if reason:
        return {"shape": case.shape, "gate": f"failed: {reason}"}
    low, median, high = measure(case.run, device, seconds)
    plain = measure(case.torch_way, device, seconds)[1]
    result: dict[str, Any] = {
        "shape": case.shape,
        "gate": "passed",
        "us": round(median, 1),
        "us_p20": round(low, 1),
        "us_p80": round(high, 1),
        "bytes": case.num_bytes,
        "fraction_of_copy_bandwidth": round(case.num_bytes / (median * 1e-6) / bandwidth, 4),
        "torch_us": round(plain, 1),
        "speedup_over_torch": round(plain / median, 2),
    }
    for name, run in case.rivals.items():
        try:
            result[f"{name}_us"] = round(measure(run, device, seconds)[1], 1)
        except (RuntimeError, TypeError, ValueError) as error:  # another version's interface
            result[f"{name}_error"] = str(error)[:200]
    return result


def forward_us(seconds: float, context: int = 64) -> float:
    """One decode step of a model of SmolLM2-135M's shape: 1 row, 1 token, fp32."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config).eval()
        cache = DynamicCache(config=config)
        model(torch.zeros(1, context, dtype=torch.int64), cache=cache)

        def step() -> None:
            model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
            cache.crop(-1)

        return measure(step, torch.device("cpu"), seconds)[1]


def main(argv: list[str] | None = None) -> int:
    """Runs every case; 0 if every gate passed. The command line calls this too."""
    args = parse(argv)
    device = torch.device(args.device or default_device())
    chosen, reason = K.backend(device)
    report: dict[str, Any] = {"benchmark": "kernels", "backend": chosen, "backend_reason": reason}
    report |= {"device": device.type, "seed": SEED, **about()}
    report["machine"]["threads"] = torch.get_num_threads()
    report["versions"]["triton"] = version("triton") if find_spec("triton") else None
    bandwidth = copy_bandwidth(device, args.seconds)
    report["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
    report["ops"] = {}
    for case in cases(device):
        result = report["ops"][case.name] = run_case(case, device, bandwidth, args.seconds)
        print(f"{case.name:16} {case.shape:44} " + _line(result))
    if device.type == "cpu" and "us" in report["ops"]["coupled_verify"]:
        step = forward_us(args.seconds)
        share = report["ops"]["coupled_verify"]["us"] / step
        report["forward_us"], report["cpu_verify_share_of_forward"] = (
            round(step, 1),
            round(share, 6),
        )
        print(f"{'decode step':16} {'SmolLM2-135M shape, B=1, fp32':44} {step:9.1f} us")
    out = args.out or RUNS / f"kernels_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(report)
    out.write_text(line + "\n")
    print(line)
    return 0 if all(op["gate"] == "passed" for op in report["ops"].values()) else 1


def _line(result: dict[str, Any]) -> str:
    if result["gate"] != "passed":
        return f"gate {result['gate']}: no speed is reported"
    return (
        f"{result['us']:9.1f} us  {result['fraction_of_copy_bandwidth']:6.1%} of copy  "
        f"{result['speedup_over_torch']:5.1f}x torch"
    )


if __name__ == "__main__":
    sys.exit(main())
