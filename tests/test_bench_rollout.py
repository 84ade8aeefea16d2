"""benchmarks/rollout.py: every figure that is asked for, on identical rollouts, in either dtype.

How to run: python -m pytest tests/test_bench_rollout.py
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from models import tiny_model
from tiny import save_tiny_model

import minitlt.models
from minitlt import native
from minitlt.linear import Linear
from minitlt.target import make_target

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # for _machine.py beside it
spec = importlib.util.spec_from_file_location("bench_rollout", BENCHMARKS / "rollout.py")
assert spec and spec.loader
rollout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rollout)

SIZES = ["1", "2", "4", "8", "16", "32"]
pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The benchmark's model is a tiny one, its peer a fake that is at 100 tokens per second."""
    folder = save_tiny_model(
        tmp_path / "model", max_position_embeddings=2048, num_hidden_layers=3, hidden_size=16
    )
    monkeypatch.setattr(minitlt.models, "resolve_model", lambda name: folder)
    monkeypatch.setattr(rollout, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.6, 0.0, 0.0))
    jobs = []

    def peer(python, job, threads):
        jobs.append(job)
        completions = {str(n): [[5, 6]] * n for n in job["sizes"]}
        return {"version": "1", "completions": completions,
                "tok_s": {str(n): 100.0 for n in job["sizes"]}}  # fmt: skip

    monkeypatch.setattr(rollout, "run_peer", peer)
    return jobs


def run(tmp_path, capsys, *arguments):
    """(what is printed last, what is written)."""
    out = tmp_path / "out.json"
    options = ["--quick", "--new", "6", "--least", "12", "--drafter", "target", "--threads", "1"]
    assert rollout.main([*options, "--device", "cpu", "--out", str(out), *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1]), json.loads(out.read_text())


def test_a_quick_run_gives_every_figure(tiny, tmp_path, capsys):
    quoted, written = run(tmp_path, capsys, "--peer", "vllm", "--peer-python", sys.executable)
    assert list(quoted["spec_over_plain"]) == SIZES and min(quoted["spec_over_plain"].values()) > 0
    rates = quoted["tok_s"]
    assert {f"{name}_b{n}" for name in ("plain", "spec") for n in SIZES} | {
        "hf_b1", "hf_b16", "hf_b32"
    } == rates.keys()  # fmt: skip
    assert quoted["plain_over_hf_b32"] == rates["plain_b32"] / rates["hf_b32"]
    assert quoted["plain_over_hf_b1"] == rates["plain_b1"] / rates["hf_b1"]
    assert quoted["spec_over_hf_b16"] == rates["spec_b16"] / rates["hf_b16"]
    assert quoted["spec_over_vllm_b1"] > 0 and quoted["spec_over_vllm_b16"] > 0
    packs = Linear(torch.bfloat16, torch.device("cpu")).packs
    assert written["vllm"]["our_dtype"] == ("bf16" if packs else "fp32")
    assert [job["sizes"] for job in tiny] == [[1, 2, 4, 16]]
    assert quoted["dtype"] == "fp32" and quoted["token_mismatches"] == 0
    assert quoted["roofline_fraction_b1"] > 0
    named = {*rates, *(f"{who}vllm_b{n}" for who in ("", "spec_beside_") for n in (1, 2, 4, 16))}
    assert quoted["exactness"].keys() == named
    assert all(one["tokens"] > 0 for one in quoted["exactness"].values())
    assert quoted["commit"] and quoted["versions"]["torch"] and quoted["machine"]["threads"] == 1
    assert quoted["alone"] is False
    assert quoted.items() <= written.items()
    assert list(written["step_ms"]) == SIZES and list(written["step_ms"]["32"]) == ["1", "4", "16"]
    # Few rows are soon done: a repeat is as many rollouts as give 12 tokens.
    assert all(12 <= one["tokens"] <= 12 + 6 * 32 for one in written["speculation"].values())


def test_in_bf16_tokens_are_compared_too_where_native_code_decodes(tiny, tmp_path, capsys):
    if native.library() is None:
        pytest.skip(native.status())
    quoted, _ = run(tmp_path, capsys, "--dtype", "bf16", "--sizes", "2", "--least", "1")
    assert quoted["dtype"] == "bf16" and quoted["token_mismatches"] == 0


def test_without_it_both_replay_and_one_rollout_of_each_size_does_not(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(native, "library", lambda: None)
    calls, engines = [], rollout.Bench.engines

    def watch(engine, name):
        real = engine.generate

        def generate(*args, replay=None):
            done = real(*args, replay=replay)
            calls.append((name + " replayed" * (replay is not None), done.completion_ids))
            return done

        engine.generate = generate
        return engine

    monkeypatch.setattr(
        rollout.Bench, "engines", lambda *args: map(watch, engines(*args), ("plain", "spec"))
    )
    sizes = ["--sizes", "1", "8", "--repeats", "2", "--least", "1"]
    quoted, _ = run(tmp_path, capsys, "--dtype", "bf16", *sizes)
    assert quoted["dtype"] == "bf16" and quoted["token_mismatches"] is None
    pair = ["plain replayed", "spec replayed"]
    turns = ["spec", "plain", "spec", *pair, "plain", *pair]  # the first warms the bandit up
    assert [name for name, _ in calls] == turns * 2
    for first in (0, 8):
        texts = [text for _, text in calls[first : first + 8]]
        assert texts[1] == texts[3] == texts[4] and texts[5] == texts[6] == texts[7]
    assert quoted["exactness"].keys() == {"hf_b1", "plain_b1", "spec_b1", "plain_b8", "spec_b8"}


def test_the_parts_of_a_step_are_what_can_be_told_apart(way, monkeypatch):
    monkeypatch.setattr(rollout, "milliseconds", lambda run: 1.0 if run() is None else 5.0)
    target = make_target(tiny_model())
    target.reserve(2, 256)
    parts = rollout.step_parts(target, 2)
    assert ("attention" in parts) == (way == "packed")
    assert {"forward", "layer products", "head product", "verify"} < parts.keys()
    known = sum(parts.get(name, 0) for name in ("layer products", "head product", "attention"))
    assert parts["rest of the forward"] == parts["forward"] - known


def test_nothing_committed_is_written_over_by_default():
    ignored = (BENCHMARKS.parent / ".gitignore").read_text().splitlines()
    assert BENCHMARKS.parent / "runs" == rollout.RUNS and "runs/" in ignored
    options = rollout.parse([])
    assert (options.repeats, options.new, options.least) == (3, 512, 300)
    assert options.out is None
    assert rollout.engine_dtype(options.dtype, torch.float32, "cpu") == "fp32"
