"""What a CPU computes in C (csrc/): built on this machine when first needed, called by ctypes.

Why C: the small operations of a forward, one by one from Python, take as long as a third of its
products, and no library's products are both as fast as memory and alike in any company. Without a
C compiler everything still works, with oneDNN's packed products (`linear.py`), at 0.6 of the speed.

The library is kept in the cache folder, under a name that says what it was built from, with which
flags, and for which processor. Ranks may build it at the same time: each renames a whole file.

Left out: GPUs (`kernels.py`, `graphs.py`); dtypes other than fp32, bf16 and int8.
How to run: `pytest tests/test_native.py`; `minitlt doctor` says whether it is there. CC names
another compiler; MINITLT_NATIVE=0 does without.

Shape suffixes: N nodes (of all rows), K inputs, O outputs, P panels, W width of a panel, V vocab.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minitlt.common import one_line

logger = logging.getLogger(__name__)
SOURCES = sorted(Path(__file__).parent.joinpath("csrc").glob("*.c"))
# Apple's clang is told nothing: it knows no other processors than it runs on.
_TUNE = {"arm64": (), "aarch64": ("-mcpu=native",)}.get(platform.machine(), ("-march=native",))
# Some compilers reorder sums unless told not to, or do not fuse unless told to.
FLAGS = ("-O3", *_TUNE, "-fno-fast-math", "-ffp-contract=fast", "-fPIC", "-std=gnu11")
# Noise is defined in single operations; of a turn, a * b - c * d, either product could be fused.
OWN_FLAGS = dict.fromkeys(("sampler", "decoder", "drafter"), ("-ffp-contract=off",))
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in csrc/layers.h
_GROUP = 64  # as there
_BUILD_SECONDS = 120
_KEPT_DAYS = 90  # a library that nobody used; several checkouts and machines may share a folder
_ONE_IS_WORTH = 2  # threads of oneDNN; with more it is faster than one of ours
ROUNDING = 2  # one more whenever csrc/ comes to round in another way
_FLOATS: Any = {"dtype": torch.float32, "device": "cpu"}  # what C writes, whatever torch's defaults
_INTS: Any = {"dtype": torch.int64, "device": "cpu"}


class _Matrix(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("panels", "bias", "scales")),
        *((name, c_int64) for name in ("inputs", "outputs", "kind")),
    )


class _Layer(Structure):
    _fields_ = tuple((name, _Matrix) for name in ("qkv", "out", "gate", "up", "down")) + tuple(
        (name, c_void_p) for name in ("norm_in", "norm_mlp", "norm_q", "norm_k")
    )


class _Model(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("embed", "norm", "turn")),
        ("head", _Matrix),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        ("taps", c_int64 * 3),
        ("vocab", c_int64),
        ("threads", c_int64),
        ("eps", c_float),
    )


class _Pass(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "lengths", "parents", "cache")),
        *((name, c_void_p) for name in ("features", "last", "logits")),
        *((name, c_int64) for name in ("rows", "nodes", "slots", "first_slot", "room")),
    )


class _Drafter(Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("fc", "qkv", "out", "gate", "up", "down", "head")),
        *((name, c_void_p) for name in ("embed", "norm_in", "norm_h", "norm_post", "norm")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "vocab")),
        ("threads", c_int64),
        ("eps", c_float),
    )


class _Proposal(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "features", "keys", "values", "roots")),
        *((name, c_void_p) for name in ("noise_keys", "positions", "new_pairs", "temperatures")),
        *((name, c_void_p) for name in ("stops", "ids", "drafts", "parents")),
        *((name, c_int64) for name in ("rows", "room", "narrow_taps", "num_stops")),
        *((name, c_int64) for name in ("depth", "width", "nodes")),
        ("least", c_float),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """csrc/ as a library, or None; the log says why."""
    return _find()[0]


def status() -> str:
    """Whether it is there, and why not."""
    return _find()[1]


def lanes() -> int:
    """Of its vectors, 4, 8 or 16: with others it rounds otherwise. 0: it is not there."""
    found = library()
    return found.width() // 2 if found else 0


def name() -> str:
    """Who computes, for logs and for those who must notice that tokens may come to differ."""
    return f"native {ROUNDING}, {lanes()} lanes"


def agree(rank: int) -> None:
    """Called on all ranks of a CPU: where one has no library, or one that rounds in another way,
    none uses it, so that no row's bits depend on its rank. Rank 0 builds it, the others find it."""
    if rank == 0:
        library()
    dist.barrier()
    bits_R = torch.zeros(dist.get_world_size(), **_INTS)
    bits_R[rank] = bits()
    dist.all_reduce(bits_R)
    if len(bits_R.unique()) > 1:
        os.environ["MINITLT_NATIVE"] = "0"
        library.cache_clear()
        _find.cache_clear()
        if rank == 0:
            logger.warning("csrc/ rounds in other ways on other ranks, or is missing on some; "
                           "all go on without it, at 0.6 of the speed")  # fmt: skip


def bits() -> int:
    """A number that differs where it rounds in another way; 0: it is not there."""
    if library() is None:
        return 0
    product, generator = Panels(torch.float32), torch.Generator().manual_seed(0)
    product.load(torch.randn(64, 300, generator=generator, **_FLOATS))
    made = product(torch.randn(4, 300, generator=generator, **_FLOATS))
    return int(made.view(torch.int32).sum()) * 64 + lanes()


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("MINITLT_NATIVE") == "0":
        return None, "MINITLT_NATIVE=0"
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        return None, "no C compiler: install gcc, or name one in CC"
    if not SOURCES:
        return None, f"no C sources in {Path(__file__).parent}: install minitlt anew"
    said = ""
    for threads in ("many", "one"):
        try:
            found = _load(compiler, (*FLAGS, *(_openmp(compiler) if threads == "many" else ())))
        except (OSError, subprocess.SubprocessError) as error:
            code = getattr(error, "returncode", None)
            told = getattr(error, "stderr", None) or (f"exit status {code}" if code else error)
            said = one_line(told)[-300:]
            text = f"{compiler} cannot build it: {said}"
            continue
        if not _keeps_bits(found):
            text = f"what {compiler} builds rounds a row of a product in another way beside others"
            break
        if threads == "many":
            return found, f"built by {compiler}"
        text = f"built by {compiler} for one thread, without OpenMP: {said}"
        if torch.get_num_threads() > _ONE_IS_WORTH and torch.backends.mkldnn.is_available():
            break
        logger.warning("csrc/: %s", text)
        return found, text
    logger.warning("csrc/: %s; decoding goes on without it, at 0.6 of the speed", text)
    return None, text


def _openmp(compiler: str) -> tuple[str, ...]:
    """The flags for it. Clang's OpenMP aborts beside a second copy of itself or Intel's, as torch
    on macOS or MKL bring along: then nothing is linked, and the one that is there is used."""
    if "clang" not in _run(compiler, "--version"):
        return ("-fopenmp",)
    there = _llvm_openmp()
    if there is None:
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # ms that idle threads spin, beside torch's
        return ("-fopenmp",)
    ctypes.CDLL(there, ctypes.RTLD_GLOBAL)
    later = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    return ("-Xpreprocessor", "-fopenmp", *later)


@functools.cache
def _llvm_openmp() -> str | None:
    """Where LLVM's or Intel's OpenMP of this process is, before any of ours."""
    if sys.platform == "darwin":
        path = Path(torch.__file__).parent / "lib" / "libomp.dylib"
        return str(path) if path.exists() else None
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    # Address, rights, offset, device, inode; the path may have blanks.
    loaded = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) > 5}
    of_it = (path for path in loaded if Path(path).name.startswith(("libomp.so", "libiomp5.so")))
    return next(of_it, None)


def _load(compiler: str, flags: Sequence[str]) -> ctypes.CDLL:
    from minitlt.models import cache_dir

    texts = [file.read_text("utf-8") for file in sorted(SOURCES[0].parent.glob("*.[ch]"))]
    by = (compiler, _run(compiler, "--version"), platform.machine(), _processor())
    made_of = "|".join([*texts, *flags, str(OWN_FLAGS), *by])
    name = f"native-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    try:
        path = cache_dir() / name
        if _is_whole(path):
            with contextlib.suppress(OSError):
                path.touch()  # it is in use
            try:
                return _typed(path)
            except OSError:  # built where other libraries are
                logger.info("%s cannot be loaded and is built anew", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(compiler, flags, path)
        _forget_old(path.parent)
        return _typed(path)
    except (OSError, RuntimeError):  # no home; nothing can be written there, or loaded from there
        with tempfile.TemporaryDirectory() as own:
            _build(compiler, flags, Path(own) / name)
            return _typed(Path(own) / name)


def _forget_old(folder: Path) -> None:
    for path in folder.glob("native-*.so"):
        with contextlib.suppress(OSError):  # others remove them too, or they are others'
            if path.stat().st_mtime < time.time() - _KEPT_DAYS * 86400:
                path.unlink()


def _build(compiler: str, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        nothing = ("-x", "c", os.devnull, "-o", str(Path(work) / "nothing.so"))
        _run(compiler, *flags, "-shared", *nothing)  # where OpenMP is missing, that is soon said
        objects = [str(Path(work) / f"{source.stem}.o") for source in SOURCES]
        for source, made in zip(SOURCES, objects, strict=True):
            own = OWN_FLAGS.get(source.stem, ())
            _run(compiler, *flags, *own, "-c", str(source), "-o", made)
        whole = Path(work) / path.name
        _run(compiler, *flags, "-shared", *objects, "-o", str(whole), "-lm")
        with whole.open("ab") as file:  # loaders do not mind what stands behind a library
            file.write(hashlib.sha256(whole.read_bytes()).digest())
        whole.replace(path)


def _is_whole(path: Path) -> bool:
    """To load half a file, as a loss of power may leave it, would kill the process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-32:] == hashlib.sha256(data[:-32]).digest()


def _run(*command: str) -> str:
    options: Any = {"capture_output": True, "text": True, "errors": "replace", "check": True}
    return subprocess.run(command, timeout=_BUILD_SECONDS, **options).stdout


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "|".join(sorted({line for line in lines if line.startswith(wanted)}))


def _typed(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    found.width.restype = c_int64
    found.width.argtypes = []
    found.product.restype = None
    found.product.argtypes = [POINTER(_Matrix), c_int64, c_int64, c_void_p, c_void_p]
    found.to_int8.restype = None
    found.to_int8.argtypes = [POINTER(_Matrix), c_int64, c_void_p, c_void_p]
    found.forward.argtypes = [POINTER(_Model), POINTER(_Pass)]
    found.propose.argtypes = [POINTER(_Drafter), POINTER(_Proposal)]
    return found


def _keeps_bits(found: ctypes.CDLL) -> bool:
    """A trial: rows of a product alone, and in the chunks of any register width."""
    generator = torch.Generator().manual_seed(0)
    weight_OK, x_NK = (torch.randn(n, 40, generator=generator, **_FLOATS) for n in (70, 25))
    for dtype in (torch.float32, torch.bfloat16):
        product = Panels(dtype, found)
        product.load(weight_OK)
        alone_NO = torch.cat([product(x_K[None]) for x_K in x_NK])
        if any(not torch.equal(product(x_NK[:n]), alone_NO[:n]) for n in (6, 13, 25)):
            return False
    return True


def runs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype on this device are decoded in C."""
    narrow_or_not = dtype in (torch.float32, torch.bfloat16)
    return device.type == "cpu" and narrow_or_not and library() is not None


class Panels:
    """A weight [O, K] in the order in which it is read, and its bias; replaced in place."""

    def __init__(self, dtype: torch.dtype, found: ctypes.CDLL | None = None) -> None:
        found = found or library()
        assert found is not None, "library() first"
        self._library, self.dtype, self._width = found, dtype, found.width()
        self.panels_PKW: Tensor | None = None
        self.bias: Tensor | None = None
        self.scales: Tensor | None = None  # of int8
        self.matrix = _Matrix()

    def load(self, weight_OK: Tensor, bias_O: Tensor | None = None) -> None:
        num, inputs = weight_OK.shape
        pads = -num % self._width
        weight = F.pad(weight_OK.detach(), (0, 0, 0, pads)) if pads else weight_OK.detach()
        if self.dtype == torch.bfloat16:  # outputs i and i + W/2 stand side by side
            split = weight.to(self.dtype).view(-1, 2, self._width // 2, inputs)
            ordered = split.permute(0, 3, 2, 1)
        else:
            ordered = weight.to(self.dtype).view(-1, self._width, inputs).transpose(1, 2)
        if self.panels_PKW is None:
            self.panels_PKW = torch.empty(ordered.shape, dtype=self.dtype, device="cpu")
        self.panels_PKW.copy_(ordered)
        if bias_O is not None:
            bias = F.pad(bias_O.detach().to("cpu", torch.float32), (0, pads))
            self.bias = bias.clone() if self.bias is None else self.bias.copy_(bias)
        self._describe(inputs, num)

    def load_int8(self, wide: Panels) -> None:
        """Another one's weight, rounded: of every output's next `_GROUP` inputs, what is furthest
        from 0 becomes 127. Its bias is shared."""
        assert wide.panels_PKW is not None, "load() its weight first"
        if self.panels_PKW is None:
            self.panels_PKW = torch.empty(wide.panels_PKW.shape, dtype=torch.int8, device="cpu")
            inputs, size = wide.matrix.inputs, len(wide.panels_PKW) * self._width
            self.scales = torch.empty(-(-inputs // _GROUP) * size, **_FLOATS)
            self.bias = wide.bias
            self._describe(inputs, wide.matrix.outputs)
        to = self.matrix.panels, self.matrix.scales
        self._library.to_int8(byref(wide.matrix), torch.get_num_threads(), *to)

    def _describe(self, inputs: int, outputs: int) -> None:
        held = (self.panels_PKW, self.bias, self.scales)
        at = (None if x is None else x.data_ptr() for x in held)
        self.matrix = _Matrix(*at, inputs, outputs, _KINDS[self.dtype])

    def __call__(self, x_NK: Tensor) -> Tensor:
        """[.., K] to fp32 [.., O]."""
        x = x_NK.float().contiguous()
        assert x.shape[-1] == self.matrix.inputs, "a product's inputs"
        y = torch.empty(*x.shape[:-1], self.matrix.outputs, **_FLOATS)
        num = x.numel() // self.matrix.inputs
        at = x.data_ptr(), y.data_ptr()
        self._library.product(byref(self.matrix), torch.get_num_threads(), num, *at)
        return y


class Decoder:
    """A forward of the Llama family over weights that others hold.

    layers: of each the five products and its norms ("norm_in", "norm_mlp", and of some models
        "norm_q", "norm_k"). Addresses are taken once: weights are replaced in place.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Panels | Tensor]],
        embed: Tensor,
        norm: Tensor,
        head: Panels,
        *,
        heads: tuple[int, int, int],
        taps: tuple[int, int, int],
        eps: float,
    ) -> None:
        """heads: query heads, key/value heads, size of one."""
        found = library()
        assert found is not None, "library() first"
        self._library, self._parts = found, (layers, embed, norm, head)
        self._sizes: Any = {"heads": heads, "taps": taps, "eps": eps}
        self._wide: list[tuple[Panels, Panels]] = []  # of a copy in int8: its panels, and whose
        self._layers = (_Layer * len(layers))()
        for to, layer in zip(self._layers, layers, strict=True):
            for name, part in layer.items():
                value = part.matrix if isinstance(part, Panels) else part.data_ptr()
                setattr(to, name, value)
        self._hidden = embed.shape[1]
        self._model = _Model(
            self._layers, embed.data_ptr(), norm.data_ptr(), None, head.matrix, len(layers),
            self._hidden, *heads, (c_int64 * 3)(*taps), len(embed), 1, eps,
        )  # fmt: skip

    def in_int8(self) -> Decoder:
        """The same model with weights of a byte each; `requantize` it after they have changed."""
        layers, embed, norm, head = self._parts
        wide: list[tuple[Panels, Panels]] = []

        def narrow(part: Panels | Tensor) -> Any:
            if isinstance(part, Tensor):
                return part
            wide.append((Panels(torch.int8, self._library), part))
            wide[-1][0].load_int8(part)
            return wide[-1][0]

        few = [{name: narrow(part) for name, part in layer.items()} for layer in layers]
        copy = Decoder(few, embed, norm, narrow(head), **self._sizes)
        copy._wide = wide
        return copy

    def requantize(self) -> None:
        for own, wide in self._wide:
            own.load_int8(wide)

    def __call__(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        parents_BT: Tensor | None,
        cache_5: Tensor,
        first_slot: int,
        turn: Tensor,
        logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(features [B, T, 3H], last hidden states [B, T, H], logits [B, T, V] if asked for); keys
        and values go to the cache. Of pads (tokens below 0, not roots) nothing is computed, and
        their results are whatever is in memory.

        cache_5: [layers, slots, 2 kv heads, room, D]. turn: complex, [positions, D / 2].
        Raises ValueError for tokens, parents and lengths that have no place.
        """
        size = tokens_BT.shape
        tokens, lengths = tokens_BT.long().contiguous(), lengths_B.long().contiguous()
        parents = None if parents_BT is None else parents_BT.long().contiguous()
        features, last = (torch.empty(*size, n * self._hidden, **_FLOATS) for n in (3, 1))
        scores = torch.empty(*size, self._model.head.outputs, **_FLOATS) if logits else None
        self._model.turn, self._model.threads = turn.data_ptr(), torch.get_num_threads()
        _, slots, _, room, _ = cache_5.shape
        assert lengths.shape == size[:1] and (parents is None or parents.shape == size)
        assert len(turn) >= room and first_slot + len(lengths) <= slots
        given = _Pass(
            tokens.data_ptr(), lengths.data_ptr(), None if parents is None else parents.data_ptr(),
            cache_5.data_ptr(), features.data_ptr(), last.data_ptr(),
            None if scores is None else scores.data_ptr(),
            *size, slots, first_slot, room,
        )  # fmt: skip
        wrong = self._library.forward(byref(self._model), byref(given))
        if wrong == _NO_MEMORY:
            raise MemoryError("no memory for a forward")
        if wrong:
            raise ValueError(_misplaced(tokens, lengths, parents, self._model.vocab, room))
        return features, last, scores


class DraftTrees:
    """Proposals of a draft model (csrc/tree.c) over weights that others hold, replaced in place.

    panels: fc, qkv, out, gate, up, down and head. norms: of embeddings, of features, behind the
        attention, before the head. heads: query heads, key/value heads, size of one. ids_V: of a
        reduced vocabulary.
    """

    def __init__(
        self,
        panels: Mapping[str, Any],
        embed: Tensor,
        norms: Sequence[Tensor],
        heads: tuple[int, int, int],
        eps: float,
        ids_V: Tensor | None,
    ) -> None:
        found = library()
        assert found is not None, "library() first"
        self._library, self._ids, self._kept = found, ids_V, (panels, embed, norms)
        names = ("fc", "qkv", "out", "gate", "up", "down", "head")
        self._model = _Drafter(
            *(panels[name].matrix for name in names),
            *(x.data_ptr() for x in (embed, *norms)), None, None,
            embed.shape[1], *heads, len(embed), 1, eps,
        )  # fmt: skip

    def __call__(
        self,
        buffers: Mapping[str, Tensor],
        turns: tuple[Tensor, Tensor],
        rows: Sequence[Tensor],
        temperatures_B: Tensor,
        stop_ids: Tensor,
        depth: int,
        width: int,
        nodes: int,
        least: float,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and parents [B, 1 + nodes] of every row's tree; new keys and values go to their
        places. A chain if width is 1, whatever `nodes` says.

        buffers: tokens, features (fp32 or bf16), keys and values, [slots, room, ..]. turns: cosines
        and sines. rows: of each row its root, noise key, length and number of new pairs; a row that
        has none gets pads.
        """
        given = [x.contiguous() for x in (*rows, temperatures_B.float(), stop_ids)]
        held = [buffers[name] for name in ("tokens", "features", "keys", "values")]
        num_rows, room = len(temperatures_B), held[0].shape[1]
        assert all(x.shape == (num_rows,) for x in given[:-1]) and len(turns[0]) >= room
        assert all(len(x) >= num_rows and x.shape[1] == room for x in held)
        nodes = depth if width == 1 else min(nodes, width + (depth - 1) * width * width)
        drafts, parents = (torch.empty(num_rows, 1 + nodes, **_INTS) for _ in range(2))
        self._model.cos, self._model.sin = (x.data_ptr() for x in turns)
        self._model.threads = torch.get_num_threads()
        asked = _Proposal(
            *(x.data_ptr() for x in (*held, *given)),
            None if self._ids is None else self._ids.data_ptr(),
            drafts.data_ptr(), parents.data_ptr(), num_rows, room,
            held[1].dtype == torch.bfloat16, len(stop_ids), depth, width, nodes, least,
        )  # fmt: skip
        wrong = self._library.propose(byref(self._model), byref(asked))
        if wrong == _NO_MEMORY:
            raise MemoryError("no memory for a draft")
        assert not wrong, "a drafter's tokens and places"
        return drafts, parents


_NO_MEMORY = 1


def _misplaced(
    tokens_BT: Tensor, lengths_B: Tensor, parents_BT: Tensor | None, vocab: int, room: int
) -> str:
    """Which row was refused, and why."""
    num_nodes = tokens_BT.shape[1]
    for row, length in enumerate(lengths_B.tolist()):
        highest = int(tokens_BT[row].max())
        if length < 0:
            return f"row {row} cannot begin at position {length}"
        if length + num_nodes > room:
            needs = length + num_nodes
            return f"row {row} needs {needs} cache positions, only {room} are reserved"
        if highest >= vocab:
            return f"row {row}: token {highest} is outside of the vocabulary of {vocab}"
        tokens, chain = tokens_BT[row].tolist(), range(-1, num_nodes - 1)
        for node, parent in enumerate(chain if parents_BT is None else parents_BT[row].tolist()):
            if parent >= node:
                return f"row {row}: node {node} must come after its parent, {parent}"
            if parent > 0 and tokens[parent] < 0 <= tokens[node]:
                return f"row {row}: node {node} stands behind a pad, {parent}"
    raise AssertionError("nothing is wrong")
