"""native code: its products and its forward, to the bit; that it is built, or done without."""

import functools
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from models import KINDS, random_prompts, tiny_model
from ranks import own_worker, two_ranks
from transformers import AutoModelForCausalLM

from minitlt import doctor, native, native_sampler
from minitlt.config import RolloutConfig
from minitlt.eagle3 import DrafterConfig
from minitlt.rl import build_speculation
from minitlt.spec import RolloutEngine, SamplingParams
from minitlt.spot import SpotConfig
from minitlt.target import full_state, make_target

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
find = native._find.__wrapped__


@pytest.fixture(scope="module", autouse=True)
def _built():
    if native.library() is None:
        pytest.skip(native.status())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def panels(outputs, inputs, dtype=torch.float32, bias=False, seed=0):
    """A product, its weight and its bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias_O = torch.randn(outputs, generator=generator) if bias else None
    product = native.Panels(dtype)
    product.load(weight, bias_O)
    return product, weight, bias_O


def rows(num, inputs):
    return torch.randn(num, inputs, generator=torch.Generator().manual_seed(1))


# Products.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 97, 160])
def test_products_are_products(outputs, bias):
    for inputs in range(1, 38):
        product, weight, bias_O = panels(outputs, inputs, bias=bias)
        x = rows(13, inputs)
        want = torch.nn.functional.linear(x.double(), weight.double())
        want += 0 if bias_O is None else bias_O
        size = x.abs() @ weight.abs().T + 1
        assert ((product(x) - want).abs() <= 1e-5 * size).all(), inputs
        assert torch.equal(product(x.view(13, 1, inputs))[:, 0], product(x))


@pytest.mark.parametrize("bias", [False, True])
def test_narrow_weights_are_widened_and_nothing_else(bias):
    for outputs, inputs in [(1, 1), (33, 37), (97, 48), (160, 5)]:
        narrow, weight, bias_O = panels(outputs, inputs, torch.bfloat16, bias)
        wide = native.Panels(torch.float32)
        wide.load(weight.bfloat16(), bias_O)
        x = rows(14, inputs)
        assert torch.equal(narrow(x), wide(x))


@DTYPES
@pytest.mark.parametrize("sizes", [(97, 37), (576, 1536), (2048, 576)])
def test_a_rows_product_has_the_same_bits_in_any_company(sizes, dtype, threads):
    product, _, _ = panels(*sizes, dtype, bias=True)
    x = rows(40, sizes[1])
    want = torch.cat([product(row[None]) for row in x])
    for num_threads in (1, 2):
        threads(num_threads)
        for num in range(1, 41):
            assert torch.equal(product(x[:num]), want[:num]), (num_threads, num)


@DTYPES
def test_no_rows_give_no_rows(dtype):
    product, _, _ = panels(97, 37, dtype, bias=True)
    assert product(rows(0, 37)).shape == (0, 97)


@DTYPES
def test_new_weights_and_a_new_bias_take_the_old_ones_place(dtype):
    product, _, _ = panels(97, 37, dtype, bias=True)
    addresses = product.panels_PKW.data_ptr(), product.bias.data_ptr()
    fresh, weight, bias_O = panels(97, 37, dtype, bias=True, seed=2)
    product.load(weight, bias_O)
    assert torch.equal(product(rows(3, 37)), fresh(rows(3, 37)))
    assert (product.panels_PKW.data_ptr(), product.bias.data_ptr()) == addresses


# The forward.

SHAPES = {
    "llama": {},  # heads of 12: a vector and a half, or less than one
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},  # heads have norms
    "llama_bias": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2": {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2},
}


@functools.cache
def target_of(kind, dtype=torch.float32):
    model = tiny_model(kind, num_hidden_layers=2, **SHAPES.get(kind, {}))
    target = make_target(model, dtype=dtype)
    assert target.native
    target.reserve(4, 128)
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_is_the_modules(kind):
    """Of ragged trees; one after another in test_target.py."""
    model = tiny_model(kind)
    tokens = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, -1, -1]])
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, 1, -1, -1]])
    lengths = torch.tensor([9, 4])
    found = []
    for backend in ("fused", "module"):
        target = make_target(model, backend=backend)
        target.reserve(2, 64)
        for row, prompt in enumerate(random_prompts(lengths.tolist())):
            target.forward(torch.tensor([prompt]), torch.tensor([0]), first_slot=row)
        logits, taps = target.forward(tokens, lengths, parents)
        found.append((logits, taps.features_BNF, taps.hidden_BNH))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got[0], want[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got[1, :3], want[1, :3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama_bias", "qwen3"])
def test_a_forward_with_narrow_weights_is_the_same_forward(kind):
    model = tiny_model(kind, dtype=torch.bfloat16).float()
    tokens, found = torch.tensor(random_prompts([9])), []
    for dtype in (torch.float32, torch.bfloat16):
        target = make_target(model, dtype=dtype)
        target.reserve(1, 32)
        found.append(target.forward(tokens, torch.tensor([0]))[0])
    assert torch.equal(*found)


def bits_of(target, slot, start, tokens):
    """Logits, taps, keys and values of a chain of tokens behind position `start` of a slot."""
    logits, taps = target.forward(torch.tensor([tokens]), torch.tensor([start]), first_slot=slot)
    kv = target.cache.whole[:, slot, :, start : start + len(tokens)]
    return logits[0], taps.features_BNF[0], taps.hidden_BNH[0], kv.permute(2, 0, 1, 3)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(SHAPES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    num_nodes=st.integers(1, 14),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_a_node_of_a_tree_has_the_bits_of_plain_decoding(
    kind, dtype, lengths, num_nodes, num_threads, seed
):
    """In any tree, beside any rows: logits, taps, and what it leaves in the cache."""
    target, spare = target_of(kind, dtype), 3
    prompts = random_prompts(lengths, seed=seed)
    for row, prompt in enumerate(prompts):
        if prompt:
            bits_of(target, row, 0, prompt)
    draw = random.Random(seed)
    size = len(lengths), num_nodes
    tokens = torch.tensor([[draw.randrange(97) for _ in range(num_nodes)] for _ in lengths])
    parents = [[draw.randrange(-1, n) for n in range(num_nodes)] for _ in lengths]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    logits, taps = target.forward(tokens, torch.tensor(lengths), torch.tensor(parents))
    torch.set_num_threads(before)
    assert logits.shape == (*size, 97)
    for row, length in enumerate(lengths):
        target.copy_slot(row, spare, length)
        kv = target.cache.whole[:, row, :, length : length + num_nodes].permute(2, 0, 1, 3)
        tree = logits[row], taps.features_BNF[row], taps.hidden_BNH[row], kv
        for node in range(num_nodes):
            path, at = [], node
            while at >= 0:
                path, at = [at, *path], parents[row][at]
            path_tokens = tokens[row, path].tolist()
            want = [part[path] for part in tree]
            assert_same_bits(bits_of(target, spare, length, path_tokens), want)
            one_by_one = [
                bits_of(target, spare, length + n, [token]) for n, token in enumerate(path_tokens)
            ]
            assert_same_bits([torch.cat(parts) for parts in zip(*one_by_one, strict=True)], want)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(SHAPES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    length=st.integers(1, 128),
    cuts=st.sets(st.integers(1, 127), max_size=6),
    seed=st.integers(0, 2**31),
)
def test_a_prompt_has_the_same_bits_however_it_is_cut(kind, dtype, length, cuts, seed):
    target, prompt = target_of(kind, dtype), random_prompts([length], seed=seed)[0]
    want = [part.clone() for part in bits_of(target, 0, 0, prompt)]
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    pieces = [bits_of(target, 1, a, prompt[a:b]) for a, b in pairwise(edges)]
    assert_same_bits([torch.cat(parts) for parts in zip(*pieces, strict=True)], want)


def test_a_head_is_turned_in_single_operations():
    """Of two products compilers choose which one they fuse."""
    target, num = target_of("llama_bias"), 40
    bits_of(target, 0, 0, [7] * num)
    keys = target.cache.whole[0, 0, :1, :num]  # the first has not been turned
    (a, b), turn = keys[:, :1].unflatten(-1, (-1, 2)).unbind(-1), target._turn[:num]
    turned = a * turn.real - b * turn.imag, a * turn.imag + b * turn.real
    assert torch.equal(keys, torch.stack(turned, -1).flatten(-2))


@DTYPES
@pytest.mark.parametrize("kind", ["llama_bias", "llama_tied", "qwen3"])
def test_a_refresh_reaches_the_decoder(kind, dtype):
    """Which took its addresses once."""
    target = make_target(tiny_model(kind), dtype=dtype)
    decoder, new = target._decoder, tiny_model(kind, seed=1)
    target.refresh(full_state(new))
    fresh = make_target(new, dtype=dtype)
    for each in (target, fresh):
        each.reserve(1, 32)
    prompt = random_prompts([20])[0]
    assert_same_bits(bits_of(target, 0, 0, prompt), bits_of(fresh, 0, 0, prompt))
    assert target._decoder is decoder


@DTYPES
def test_weights_that_are_nan_give_logits_that_are(dtype):
    model = tiny_model()
    target = make_target(model, dtype=dtype)
    target.reserve(2, 64)
    for name, _ in full_state(model):
        broken = {n: w.clone() for n, w in full_state(model)}
        broken[name].fill_(torch.nan)
        target.refresh(broken.items())
        logits, _ = target.forward(torch.full((2, 3), 7), torch.tensor([0, 5]))
        assert logits.isnan().all(), name


def test_a_row_that_is_nan_is_so_alone():
    model = tiny_model()
    target = make_target(model)
    target.reserve(2, 64)
    tokens, lengths = torch.tensor([[9, 8, 7], [5, 6, 7]]), torch.tensor([0, 0])
    want, _ = target.forward(tokens, lengths)
    model.model.embed_tokens.weight.data[9] = torch.nan
    target.refresh(full_state(model))
    logits, _ = target.forward(tokens, lengths)
    assert logits[0].isnan().all() and torch.equal(logits[1], want[1])


@pytest.mark.parametrize(
    ("tokens", "lengths", "parents", "message"),
    [
        ([1, 97], [4, 4], None, "row 1: token 97 is outside of the vocabulary of 97"),
        ([1, 3], [4, 4], [[-1, 0], [-1, 1]], "row 1: node 1 must come after its parent, 1"),
        ([1, 3], [4, 4], [[0, 0], [-1, 0]], "row 0: node 0 must come after its parent, 0"),
        ([1, 3], [4, 127], None, "row 1 needs 129 cache positions, only 128 are reserved"),
        ([1, 3], [-1, 4], None, "row 0 cannot begin at position -1"),
    ],
)
def test_what_has_no_place_is_named(tokens, lengths, parents, message):
    target = target_of("llama")
    before = target.cache.whole.clone()
    parents = parents and torch.tensor(parents)
    tokens = torch.tensor([[2, token] for token in tokens])
    with pytest.raises(ValueError, match=message):
        target.forward(tokens, torch.tensor(lengths), parents)
    assert torch.equal(target.cache.whole, before)


@pytest.mark.parametrize("parents", [None, [[-1, 0, 1, 2], [-1, 0, 0, 1]]])
def test_nothing_stands_behind_a_pad(parents):
    """Which has no keys. Pads may stand behind one, and beside drafts."""
    target, lengths = target_of("llama"), torch.tensor([4, 4])
    message = f"row 1: node {3 if parents else 2} stands behind a pad, 1"
    parents = parents and torch.tensor(parents)
    target.forward(torch.tensor([[2, 3, -1, -1], [-1, 3, 4, 5]]), lengths, parents)
    with pytest.raises(ValueError, match=message):
        target.forward(torch.tensor([[2, 3, 4, 5], [2, -1, 4, 5]]), lengths, parents)


def test_a_pass_is_of_one_shape():
    target, tokens = target_of("llama"), torch.tensor([[5, 6, 7], [5, 6, 7]])
    tree = [-1, 0, 0]
    for lengths, parents in [([4], [tree] * 2), ([4, 4], [tree]), ([4, 4], [[-1, 0]] * 2)]:
        with pytest.raises(AssertionError):
            target.forward(tokens, torch.tensor(lengths), torch.tensor(parents))


def test_numbers_of_other_types_are_read_as_what_they_are():
    target, tokens, lengths = target_of("llama"), torch.tensor([[5, 6, 7]]), torch.tensor([4])
    parents = torch.tensor([[-1, 0, 0]])
    want, _ = target.forward(tokens, lengths, parents)
    got, _ = target.forward(tokens.int(), lengths.int(), parents.int())
    assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "value"), [("dtype", torch.float64), ("device", "meta")])
def test_torchs_defaults_change_nothing(name, value):
    """C writes fp32 and int64 into memory of the host."""
    weight, x = torch.randn(97, 37), torch.randn(2, 3, 97)
    key, at, heat = torch.tensor([1, 2]), torch.tensor([3, 4]), torch.ones(2)
    tokens, parents = torch.tensor([[5, 6, 7]] * 2), torch.tensor([[-1, 0, 1]] * 2)
    target, rows_NK, lengths = target_of("llama"), rows(3, 37), torch.tensor([0, 0])

    def results():
        product = native.Panels(torch.float32)
        product.load(weight, weight[:, 0])
        yield product(rows_NK)
        logits, taps = target.forward(tokens, lengths, parents)
        yield from (logits, taps.features_BNF, taps.hidden_BNH)
        drawn = x, key, at, heat, tokens, parents, None, None, None, [5], True
        yield from native_sampler.verify(*drawn)
        yield from native_sampler.topk(x[:, 0], key, at, heat, 2, None)

    want, default = list(results()), getattr(torch, f"set_default_{name}")
    default(value)
    try:
        got = list(results())
    finally:
        default(torch.float32 if name == "dtype" else None)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


# How it is built.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, whose name has a space."""
    path = tmp_path / "a cache"
    monkeypatch.setenv("MINITLT_CACHE", str(path))
    return path


def kept(folder):
    """The library of this process, in that folder."""
    folder.mkdir(exist_ok=True)
    path = folder / Path(native.library()._name).name
    path.unlink(missing_ok=True)  # it may be loaded: never written over
    return Path(shutil.copy(native.library()._name, path))


def works(library):
    return library is not None and library.width() in (8, 16, 32)


SAYS = "from minitlt import native; print(native.status(), native.library().width())"


def test_processes_that_build_at_once_leave_one_file(folder):
    jobs = [
        subprocess.Popen([sys.executable, "-c", SAYS], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for job in jobs:
        said, _ = job.communicate(timeout=120)
        assert job.returncode == 0 and said.startswith("built by ")
    assert [path.suffix for path in folder.iterdir()] == [".so"]


def test_half_a_library_is_built_anew(folder):
    """In a process of its own: to load it would end it."""
    path = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("built by "), done
    assert len(path.read_bytes()) == len(whole)


def test_what_is_built_is_kept_until_it_cannot_be_loaded(folder, monkeypatch):
    path = kept(folder)
    with monkeypatch.context() as patched:
        patched.setattr(native, "_build", lambda *_: pytest.fail("it is there"))
        assert works(find()[0])
    real, given = native._typed, []

    def foreign_at_first(path):
        given.append(path)
        if len(given) == 1:
            raise OSError("no libgomp here")
        return real(path)

    monkeypatch.setattr(native, "_typed", foreign_at_first)
    monkeypatch.setattr(native, "_build", lambda compiler, flags, path: kept(path.parent))
    assert works(find()[0]) and given == [path, path]


def test_what_nobody_used_for_long_is_forgotten(folder, copied):
    folder.mkdir()
    now = time.time()
    for days in (1, 80, 100, 900):
        path = folder / f"native-{days}.so"
        path.touch()
        os.utime(path, (now - days * 86400,) * 2)
    (folder / "model.safetensors").touch()
    os.utime(folder / "model.safetensors", (1, 1))
    assert works(find()[0])
    ours = copied[0]
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted([ours.name, "model.safetensors", "native-1.so", "native-80.so"])
    os.utime(ours, (1, 1))
    assert works(find()[0]) and len(copied) == 1 and ours.stat().st_mtime > 1e9


def refuse_openmp(tmp_path, anew):
    """CC is a compiler without it."""
    compiler, real = tmp_path / "cc", shutil.which(os.environ.get("CC") or "cc")
    refuses = 'case " $* " in *" -fopenmp "*) echo no -fopenmp >&2; exit 1; esac'
    compiler.write_text(f'#!/bin/sh\n{refuses}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    anew.setenv("CC", str(compiler))
    anew.setenv("MINITLT_CACHE", str(tmp_path / "cache"))
    return compiler


def test_without_openmp_it_has_the_same_bits_and_says_so(tmp_path, anew, caplog, threads):
    """Apple's compiler has none, nor has clang without libomp."""
    threads(2)
    prompt, kinds = random_prompts([20])[0], ("llama_bias", "qwen3")
    want = [bits_of(target_of(kind), 0, 0, prompt) for kind in kinds]
    compiler = refuse_openmp(tmp_path, anew)
    native.library.cache_clear()
    native._find.cache_clear()
    for kind, bits in zip(kinds, want, strict=True):
        target = make_target(tiny_model(kind, num_hidden_layers=2, **SHAPES[kind]))
        target.reserve(1, 64)
        assert target._decoder._library is native.library()
        assert_same_bits(bits_of(target, 0, 0, prompt), bits)
    (said,) = (record.getMessage() for record in caplog.records)
    status = f"built by {compiler} for one thread, without OpenMP: no -fopenmp"
    assert said == f"csrc/: {status}" and native.status() == status
    state, text = finding()
    assert state == doctor.NOTE and text.startswith(status)


def test_one_thread_of_ours_does_not_take_the_place_of_many(tmp_path, anew, caplog, threads):
    threads(3)
    refuse_openmp(tmp_path, anew)
    assert native.library() is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert "for one thread, without OpenMP" in said and "goes on without it" in said


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS torch has one")
@pytest.mark.parametrize("there", [True, False])
def test_clangs_openmp_is_not_linked_beside_another(there, tmp_path):
    """It would abort."""
    compiler, other = tmp_path / "cc", tmp_path / "libiomp5.so"
    compiler.write_text("#!/bin/sh\necho clang version 22\n")
    compiler.chmod(0o755)
    real = os.environ.get("CC") or "cc"
    subprocess.run([real, "-shared", "-x", "c", os.devnull, "-o", other], check=True)
    load = f"import ctypes, os; ctypes.CDLL({str(other)!r}); " if there else "import os; "
    code = "from minitlt.native import _openmp as f; print(f(os.environ['CC']), "
    code = load + code + "os.environ.get('KMP_BLOCKTIME'))"
    env = {**os.environ, "CC": str(compiler)}
    env.pop("KMP_BLOCKTIME", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    want = "('-Xpreprocessor', '-fopenmp') None" if there else "('-fopenmp',) 1"
    assert done.stdout.strip() == want, done


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-gcc"), reason="no compiler for ARM")
def test_for_arm_it_is_built_of_vectors(tmp_path):
    """Vectors that no register holds would be added lane by lane."""
    flags = [flag for flag in native.FLAGS if "native" not in flag] + ["-march=armv8.4-a+sve"]
    for source in native.SOURCES:
        to = tmp_path / source.stem
        command = ("aarch64-linux-gnu-gcc", *flags, "-fopenmp", "-S", source, "-o", to)
        subprocess.run(command, check=True)
    text = (tmp_path / "layers").read_text()
    assert "fmla\tv" in text and "fmadd" not in text


def test_without_a_place_to_keep_it_it_is_built_for_this_process(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINITLT_CACHE", str(tmp_path / "file" / "cache"))
    assert works(find()[0])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def copied(monkeypatch):
    """Built in no time: as this process has it. The paths it was built at."""
    paths = []

    def build(compiler, flags, path):
        assert path.parent.is_dir()
        shutil.copy(native.library()._name, path)
        paths.append(path)

    monkeypatch.setattr(native, "_build", build)
    return paths


def test_a_folder_that_nothing_can_be_run_from_is_done_without(folder, copied, monkeypatch):
    real = native._typed

    def typed(path):
        if path.parent == folder:
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(native, "_typed", typed)
    for num in (2, 4):  # the second time it is there, and cannot be loaded again
        assert works(find()[0]) and len(copied) == num and copied[-1].parent != folder


def test_without_a_home_it_is_built_for_this_process(copied, monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MINITLT_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert works(find()[0]) and len(copied) == 1


def test_without_any_place_to_write_it_is_done_without(tmp_path, monkeypatch):
    def no_place(*args, **kwargs):
        raise FileNotFoundError("No usable temporary directory found")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINITLT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", no_place)
    library, status = find()
    assert library is None and "No usable temporary directory found" in status


def test_without_its_sources_it_is_done_without(folder, monkeypatch):
    monkeypatch.setattr(native, "SOURCES", [])
    library, status = find()
    assert library is None and "no C sources" in status and not folder.exists()


def test_another_version_of_the_compiler_builds_it_anew(folder, copied, monkeypatch):
    for version in ("cc 14.2", "cc 14.2", "cc 15.1"):
        monkeypatch.setattr(native, "_run", lambda *command, version=version: version)
        assert works(find()[0])
    assert len(set(copied)) == len(copied) == 2


def test_a_library_whose_products_depend_on_company_is_not_used(
    folder, copied, monkeypatch, caplog
):
    real = native.Panels.__call__
    for few in (2, 7, 14):

        def moody(product, x_NK, few=few):
            return real(product, x_NK) + 1e-6 * (len(x_NK) < few)

        monkeypatch.setattr(native.Panels, "__call__", moody)
        library, status = find()
        assert library is None and "beside others" in status and status in caplog.text


def build_on_a_rank(folder, model_dir, without):
    rank = int(os.environ["RANK"])
    os.environ |= {"MINITLT_CACHE": str(folder)}
    if rank == without:
        os.environ["MINITLT_NATIVE"] = "0"
    dist.init_process_group("gloo")
    build, model = native._build, AutoModelForCausalLM.from_pretrained(model_dir)

    def builds(*args):
        (folder / f"built by rank {rank}").touch()
        build(*args)

    native._build = builds
    cpu = {"device": torch.device("cpu"), "rank": rank, "world_size": 2}
    parts = build_speculation(model, RolloutConfig(), DrafterConfig(), SpotConfig(), **cpu)
    want = "packed" if without is not None else native.name()
    assert parts.engine.target.decoder == want and (native.library() is None) == (want == "packed")
    parts.spot.close()
    dist.destroy_process_group()


@own_worker
@pytest.mark.parametrize("without", [None, 1])
def test_ranks_decode_alike_and_one_builds(without, tmp_path, model_dir):
    two_ranks(build_on_a_rank, tmp_path, model_dir, without, timeout=120)
    assert [path.name for path in tmp_path.glob("built*")] == ["built by rank 0"]


@pytest.mark.parametrize("tree", [True, False])
def test_trees_that_may_change_a_token_are_named(way, tree, model_dir, caplog):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    rollout = RolloutConfig(arms=["off", "eagle-2", *["eagle-2x2"] * tree])
    cpu = {"device": torch.device("cpu")}
    parts = build_speculation(model, rollout, DrafterConfig(), SpotConfig(mode="off"), **cpu)
    said = [r for r in caplog.records if "a tree among rollout.arms" in r.getMessage()]
    assert len(said) == (tree and way == "packed")
    parts.spot.close()


@pytest.fixture
def anew(monkeypatch):
    """As in a process that has not looked for it yet."""
    monkeypatch.setattr(native, "_find", functools.cache(find))
    monkeypatch.setattr(native, "library", functools.cache(native.library.__wrapped__))
    return monkeypatch


def finding():
    ((state, name, text),) = doctor._decoder()
    assert name == "decoder on cpu"
    return state, text


def test_the_doctor_names_the_compiler_and_the_switches(anew):
    state, text = finding()
    assert state == doctor.OK and "CC" in text and "MINITLT_NATIVE=0" in text
    assert text.startswith(f"built by {shutil.which(os.environ.get('CC') or 'cc')}, ")


def test_a_compiler_that_fails_is_said_once_and_done_without(anew, caplog):
    anew.setenv("CC", "false")
    for _ in range(3):
        assert not native.runs(torch.float32, torch.device("cpu"))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "false cannot build it: exit status 1; " in said and "without it" in said
    target = make_target(tiny_model())
    assert not target.native and target.head.panels is None
    params, prompts = SamplingParams(max_new_tokens=8, temperature=0.0), random_prompts([9, 4])
    both = target, make_target(tiny_model(), backend="module")
    done, want = (RolloutEngine(t).generate(prompts, params, [1, 2]) for t in both)
    assert done.completion_ids == want.completion_ids
    state, text = finding()
    assert state == doctor.NOTE and "false cannot build it" in text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("PATH", "", "no C compiler: install gcc, or name one in CC"),
     ("MINITLT_NATIVE", "0", "MINITLT_NATIVE=0")],
)  # fmt: skip
def test_without_a_compiler_or_if_it_is_not_wanted(anew, caplog, name, value, message):
    anew.delenv("CC", raising=False)
    anew.setenv(name, value)
    assert native.library() is None and native.status() == message and not caplog.records
    state, text = finding()
    assert state == doctor.NOTE and text.startswith(message)


def test_what_it_does_not_do_is_left_to_others():
    cpu = torch.device("cpu")
    assert native.runs(torch.float32, cpu) and native.runs(torch.bfloat16, cpu)
    assert not native.runs(torch.float64, cpu) and not native.runs(torch.float16, cpu)
    assert not native.runs(torch.float32, torch.device("cuda"))
