"""The draft model: one Llama-type layer that reads the target's hidden states (EAGLE-3).

The idea (EAGLE-3, arXiv 2503.01840). The target has already computed, at every committed position,
hidden states that say most of what comes next. `fc` fuses three of them (low, mid and high layers)
into one *feature* h; a single decoder layer reads the pair (embedding of the next token, h) and its
output is both a draft of the next token and the h of the pair after it, so the model can run on
from its own output:

    pair t = (x_{t+1}, h_t), rope position t, drafts x_{t+2}
    x_2H   = [norm_in(embed(x_{t+1})), norm_h(h_t)]            queries, keys and values read this
    h'     = h_t + out(attention(x_2H));  h' = h' + mlp(norm_post(h'))
    logits = head(norm(h'));              h_{t+1} := h'        (the state before the norm)

Two matrices belong to the target: the embedding and, unless `own_head`, the head rows. They are
tied by reference (`tie`), never copied, so a policy update cannot leave them behind. The drafter
may draft from a reduced vocabulary: `ids_V` holds the target ids it knows, ascending.

Left out: the flags of EAGLE 3.1 (post-norm recurrence, a norm per tap) and attention biases; no
engine needs them of a drafter trained here. More than one layer, other rope types than the static
ones (default, linear, llama3, yarn).

How to run: `pytest tests/test_eagle3.py`.

Shape suffixes: N pairs, M query pairs of a pack, S unrolled steps, H hidden, F = 3H taps, D head
dim, V draft vocabulary (DV in file formats), W the target's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitlt import native
from minitlt.common import option, reading, write_atomically
from minitlt.draft import STATIC_ROPE, default_taps
from minitlt.linear import Linear
from minitlt.tensorfile import read_tensors, write_tensors

FILE = "drafter.safetensors"
LOSSES = ("lk", "kl", "tv")
TAP_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SCALE = ".scale"  # of a matrix that is stored in int8
_SIZES = "minitlt_drafter"  # in a file's header: the Eagle3Config, as JSON


@dataclass
class DrafterConfig:
    """The `drafter:` block of a recipe. ValueError names the field that is out of range."""

    start: str = option(
        "target",
        "where the drafter starts: target (last MLP, high tap and head rows are copied), random, "
        "smollm2 (warm, comes with the package), or a folder with a saved or exported drafter",
    )
    draft_vocab_size: int = option(4096, "tokens the drafter can propose; 0 is the full vocabulary")
    train_head: bool = option(True, "own, trained head rows; otherwise the target's, by reference")
    serve_dtype: str = option(
        "auto", "weights of proposals: auto (bfloat16 where products have it), float32, bfloat16"
    )
    tap_dtype: str = option("bfloat16", "how taps are kept: bfloat16, float16, float32, float64")
    ngram_min: int = option(2, "shortest suffix that the n-gram drafter matches, in tokens")
    ngram_max: int = option(16, "longer matches than this are not told apart")
    ngram_tokens: int = option(200_000, "tokens that the n-gram index remembers (400 bytes each)")
    loss: str = option("lk", "lk (KL, whose weight falls as exp(-3 acceptance), and TV), kl or tv")
    ttt_steps: int = option(4, "steps that training unrolls; a deeper draft is never learnt")
    ttt_decay: float = option(0.8, "weight of each unrolled step's loss against the one before")
    learning_rate: float = option(5e-4, "AdamW, all but the head")
    head_learning_rate: float = option(1e-4, "AdamW, the head")
    warmup_steps: int = option(20, "train steps until the learning rates are reached")
    average: float = option(0.98, "decay, per train step, of the average of weights that drafts")
    clip: float = option(0.5, "largest norm of a gradient")
    train_dtype: str = option("auto", "products of training: as serve_dtype; weights stay fp32")
    train_step_ms: float = option(0.0, "time a train step may take; 0: 50 on GPU, 250 on CPU")
    pack_tokens: int = option(0, "pairs a train step supervises; 0 adapts to train_step_ms")
    window_tokens: int = option(256, "most supervised pairs taken from one row at a time")
    context_tokens: int = option(512, "pairs before a window that it may attend to")
    buffer_tokens: int = option(32_768, "tokens that the replay buffer holds")
    long_share: float = option(0.5, "part of a pack from the last step's longest rows")
    vocab_gain: float = option(0.005, "coverage a new draft vocabulary must add to be taken")
    seed: int = option(0, "of the drafter's first weights and of its training samples")

    def __post_init__(self) -> None:
        dtypes = ("auto", "float32", "bfloat16")
        for name, choices in (
            ("loss", LOSSES), ("tap_dtype", TAP_DTYPES),
            ("serve_dtype", dtypes), ("train_dtype", dtypes),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"drafter.{name} is {value!r}; choose {', '.join(choices)}")
        positive = ("ngram_min", "ngram_tokens", "ttt_steps", "window_tokens",
                    "buffer_tokens", "learning_rate", "clip")  # fmt: skip
        shares = ("long_share", "ttt_decay", "vocab_gain", "average")
        for name, value in vars(self).items():
            if name in positive and not value > 0:
                raise ValueError(f"drafter.{name} must be positive, not {value}")
            if isinstance(value, int | float) and not 0 <= value <= (
                1 if name in shares else value
            ):
                raise ValueError(f"drafter.{name} must not be {value}: it is at least 0"
                                 + ", at most 1" * (name in shares))  # fmt: skip
        if self.ngram_max < self.ngram_min:
            raise ValueError("drafter.ngram_max must not be smaller than drafter.ngram_min")


def product_dtype(choice: str, weight: Tensor) -> torch.dtype:
    """In which dtype products with this weight run: auto is bfloat16 where the processor has it
    (where it is emulated it is far slower), and never for a drafter in fp64. ValueError for
    bfloat16 where there is none."""
    if weight.dtype != torch.float32 or choice == "float32":
        return weight.dtype
    if weight.device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        fast = any(getattr(torch.cpu, name, bool)() for name in names)
    if choice == "bfloat16" and not fast:
        raise ValueError("this processor has no bfloat16 products; choose auto or float32 for "
                         "drafter.serve_dtype and drafter.train_dtype")  # fmt: skip
    return torch.bfloat16 if fast else torch.float32


@dataclass(frozen=True)
class Eagle3Config:
    """Size facts of a draft model, normally read off the target. `rope` is transformers'
    `rope_parameters`; `tap_layers` index the target's hidden_states (entry i = input of layer i).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_positions: int
    rope: dict[str, Any]
    num_target_layers: int
    tap_layers: tuple[int, int, int]
    own_head: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} does not fit the target's "
                f"{self.vocab_size} tokens"
            )
        if self.rope.get("rope_type", "default") not in STATIC_ROPE:
            raise ValueError(
                f"rope type {self.rope.get('rope_type')!r} is not supported by the drafter; "
                f"supported: {', '.join(STATIC_ROPE)}"
            )
        if float(self.rope.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError("partial rotary embeddings are not supported by the drafter")

    @classmethod
    def from_target(cls, config: Any, drafter: DrafterConfig | None = None) -> Eagle3Config:
        """The drafter of this target (`config` is transformers'). A draft vocabulary above the
        target's is cut to it."""
        drafter = drafter or DrafterConfig()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        vocab = config.vocab_size
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=vocab,
            draft_vocab_size=min(drafter.draft_vocab_size or vocab, vocab),
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            rope=rope_parameters(config),
            num_target_layers=layers,
            tap_layers=default_taps(layers),
            own_head=drafter.train_head,
        )

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


def rope_parameters(config: Any) -> dict[str, Any]:
    """transformers' new-style rope parameters of a config, also of one in the old style."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        scaling = dict(getattr(config, "rope_scaling", None) or {})
        theta = getattr(config, "rope_theta", None)
        if theta is None:
            raise ValueError("the model has no rotary embedding; the drafter needs one")
        scaling.setdefault("rope_type", scaling.pop("type", None) or "default")
        rope = {"rope_theta": theta, **scaling}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rotary embeddings that differ by layer are not supported by the drafter")
    return dict(rope)


def llama_config(config: Eagle3Config) -> dict[str, Any]:
    """The keys of a one-layer transformers LlamaConfig with these sizes."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "rope_parameters": dict(config.rope),
        "attention_bias": False,
        "mlp_bias": False,
    }


@dataclass
class Pack:
    """Pairs of several documents side by side; a pair sees earlier pairs of its own document only.

    features_NF, tokens_N, positions_N: the pairs (x_{t+1}, taps of t) and their rope positions t.
    query_M: which of the N pairs are run through the whole layer; the others are only seen.
    tokens_SM: the token of each query pair at unrolled step s, i.e. x_{t+1+s}; row 0 repeats
        tokens_N[query_M].
    documents: (number of pairs, how many of the last of them are queries) per document, in order.
    """

    features_NF: Tensor
    tokens_N: Tensor
    positions_N: Tensor
    query_M: Tensor
    tokens_SM: Tensor
    documents: list[tuple[int, int]]


class _TargetTensors:
    """The target's two matrices, referred to. A drafter and its serving copies share one of these,
    so one `tie` reaches them all; nn.Module does not adopt what hangs on a plain object."""

    def __init__(self) -> None:
        self.embed: Tensor | None = None
        self.head: Tensor | None = None
        self.ties = 0


class Eagle3Drafter(nn.Module):
    """The draft model. Every parameter is its own; the target's tensors are only referred to.

    Parameters are named as the formulas above; queries, keys and values share one matrix, gate and
    up another. `ids_V` (buffer) maps draft ids to target ids.
    """

    ids_V: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = c = config
        random = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> nn.Parameter:
            values = torch.empty(rows, columns, dtype=torch.float32)
            return nn.Parameter(values.normal_(0.0, 0.02, generator=random).to(device, dtype))

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(c.hidden_size, dtype=dtype, device=device))

        wide = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.fc = matrix(c.hidden_size, 3 * c.hidden_size)
        self.qkv = matrix(wide, 2 * c.hidden_size)
        self.out = matrix(c.hidden_size, c.num_heads * c.head_dim)
        self.gate_up = matrix(2 * c.intermediate_size, c.hidden_size)
        self.down = matrix(c.hidden_size, c.intermediate_size)
        self.norm_in, self.norm_h, self.norm_post, self.norm = ones(), ones(), ones(), ones()
        self.head = matrix(c.draft_vocab_size, c.hidden_size) if c.own_head else None
        self.register_buffer("ids_V", torch.arange(c.draft_vocab_size, device=device))
        self._inv_freq, self._rope_scale = _rope_frequencies(c)
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._target = _TargetTensors()
        self._rows: tuple[tuple[int, ...], Tensor] | None = None
        self._packed: dict[str, Tensor] = {}  # norms of a packed copy
        self._linears: dict[str, Linear] = {}
        self._trees: tuple[tuple[int, ...], native.DraftTrees] | None = None
        self._packed_dtype = dtype

    # The target's tensors.

    def tie(self, embed_weight: Tensor, lm_head_weight: Tensor) -> None:
        """Points the drafter at the target's embedding and head, both [W, H], by reference.

        Call it again after every refresh that replaced the tensors or wrote through `.data`;
        ordinary in-place updates are noticed by themselves.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embedding", embed_weight), ("lm head", lm_head_weight)):
            if weight.shape[1] != shape[1] or weight.shape[0] < shape[0]:
                raise ValueError(f"the target's {name} is {tuple(weight.shape)}, expected {shape}")
        self._target.embed, self._target.head = embed_weight, lm_head_weight
        self._target.ties += 1

    def target_rows(self) -> Tensor:
        """The target's head rows of the draft vocabulary, [V, H], detached.

        A full vocabulary is the tensor itself. A reduced one is gathered once per version of the
        target's head and of `ids_V`.
        """
        head = self.target_head()
        if not self.config.reduced:
            return head
        key = self._head_key()
        if self._rows is None or self._rows[0] != key:
            self._rows = (key, head[self.ids_V.to(head.device)].to(self.fc.dtype))
        return self._rows[1]

    def _head_key(self) -> tuple[int, ...]:
        """Another one whenever the target's head rows of the draft vocabulary may be others."""
        head = self.target_head()
        return self._target.ties, head.data_ptr(), head._version, self.ids_V._version

    def target_head(self) -> Tensor:
        """The target's head itself, [W, H], detached."""
        assert self._target.head is not None, "tie() the drafter to its target first"
        return self._target.head.detach()[: self.config.vocab_size]

    def embed(self, tokens_N: Tensor) -> Tensor:
        assert self._target.embed is not None, "tie() the drafter to its target first"
        return F.embedding(tokens_N, self._target.embed.detach()).to(self.fc.dtype)

    # The pieces of one step. N may be any leading shape.

    def fuse(self, features_NF: Tensor) -> Tensor:
        """fc: three taps of width H each in, one feature of width H out."""
        assert features_NF.shape[-1] == 3 * self.config.hidden_size, "fc reads 3H features"
        return self._mm("fc", features_NF.to(self.fc.dtype))

    def mix(self, tokens_N: Tensor, h_NH: Tensor) -> Tensor:
        """The layer's input, twice the hidden width."""
        assert h_NH.shape[-1] == self.config.hidden_size, "the recurrent state has width H"
        token_NH = self.embed(tokens_N)
        if self._packed:
            return self._norm(torch.stack([token_NH, h_NH], -2), "mix").flatten(-2)
        return torch.cat([self._norm(token_NH, "norm_in"), self._norm(h_NH, "norm_h")], -1)

    def attention_inputs(self, x_N2H: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, heads, D] and keys, both rotated, and values [N, kv heads, D]."""
        heads, kv = self.config.num_heads, self.config.num_kv_heads
        qkv = self._mm("qkv", x_N2H).unflatten(-1, (-1, self.config.head_dim))
        qk = self._rotate(qkv[..., : heads + kv, :], positions_N)
        return qk[..., :heads, :], qk[..., heads:, :], qkv[..., heads + kv :, :]

    def finish(self, h_NH: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: attended [N, heads, D] in, the next recurrent state out."""
        h_NH = h_NH + self._mm("out", attended.flatten(-2))
        x_NH = self._norm(h_NH, "norm_post")
        if self._linears:
            gate, up = self._mm("gate", x_NH), self._mm("up", x_NH)
        else:
            gate, up = self._mm("gate_up", x_NH).chunk(2, -1)
        return h_NH + self._mm("down", F.silu(gate) * up)

    def logits(self, h_NH: Tensor) -> Tensor:
        """[N, V] over the draft vocabulary. The norm is the head's; the state goes on without."""
        return self._mm("head", self._norm(h_NH, "norm"))

    def unroll(self, pack: Pack, num_steps: int, *, thin: bool = False) -> list[Tensor]:
        """The recurrent state of every query pair after each of `num_steps` steps, [M, H] each.
        thin: step s is taken only by the queries of the first 1 / (s + 1) of the documents.

        EAGLE-3's training-time test: step 0 reads the target's features, step s the state of step
        s - 1 with the true token s places on. A query at step s sees the step-0 keys up to its own
        place and, at its own place only, the keys of steps 1..s: exactly what it would see had the
        drafter run on from there. Attention is computed document by document (block-diagonal).
        """
        h_NH = self.fuse(pack.features_NF)
        q_NQD, k_NKD, v_NKD = self.attention_inputs(self.mix(pack.tokens_N, h_NH), pack.positions_N)
        at_M, q_MQD = pack.positions_N[pack.query_M], q_NQD[pack.query_M]
        h_MH, states = h_NH[pack.query_M], []
        later: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            documents = pack.documents[: -(-len(pack.documents) // (step + 1 if thin else 1))]
            m = sum(num_queries for _, num_queries in documents)
            if step:
                x_M2H = self.mix(pack.tokens_SM[step, :m], h_MH[:m])
                q_MQD, k_MKD, v_MKD = self.attention_inputs(x_M2H, at_M[:m] + step)
                later.append((k_MKD, v_MKD))
            attended = _attend_documents(q_MQD, k_NKD, v_NKD, later, documents)
            h_MH = self.finish(h_MH[:m], attended)
            states.append(h_MH)
        return states

    def twin(self, dtype: torch.dtype | None = None) -> Eagle3Drafter:
        """A second drafter with the same weights and the same target."""
        copy = Eagle3Drafter(self.config, dtype=dtype or self.fc.dtype, device=self.fc.device)
        copy._target = self._target
        copy.load_state_dict(self.state_dict())
        for theirs, own in zip(copy.parameters(), self.parameters(), strict=True):
            theirs.requires_grad_(own.requires_grad)  # what is frozen stays so
        return copy

    # Serving.

    def serving_copy(self, choice: str = "auto") -> Eagle3Drafter:
        """A frozen drafter with the same weights and the same target, ready to propose.

        On a GPU all of it is in `product_dtype`; on a CPU only the packed weights are narrow.
        """
        narrow = product_dtype(choice, self.fc)
        dtype = self.fc.dtype if self.fc.device.type == "cpu" else narrow
        copy = self.twin(dtype)
        copy.requires_grad_(False)
        copy._packed_dtype = narrow
        copy.pack_weights()
        return copy

    def pack_weights(self) -> None:
        """Packs the weights of a serving copy, on a CPU; elsewhere nothing is done.

        Two to eight rows then cost little more than one. Call it again after every change of the
        weights. A packed drafter cannot be trained.
        """
        self._packed = {}
        packable = self.fc.device.type == "cpu" and self.fc.dtype == torch.float32
        if not packable or not Linear(self._packed_dtype, self.fc.device).packs:
            return
        weights = {name: getattr(self, name) for name in ("fc", "qkv", "out", "down")}
        weights["gate"], weights["up"] = self.gate_up.chunk(2)
        if self.head is not None:
            weights["head"] = self.head
        for name, weight in weights.items():
            linear = self._linears.setdefault(name, Linear(self._packed_dtype, self.fc.device))
            linear.load(weight)
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(eps H)) / sqrt(H)
        mix, size = torch.stack([self.norm_in, self.norm_h]), self.config.hidden_size
        for name, weight in (("mix", mix), ("norm_post", self.norm_post), ("norm", self.norm)):
            self._packed[name] = weight.detach() * size**0.5
        self._packed["floor"] = torch.tensor(self.config.rms_norm_eps * size).sqrt()

    def native_trees(self) -> native.DraftTrees | None:
        """Proposals of a packed copy in C, where there is one. Own weights are replaced in place;
        the target's head rows are packed again when they change, so ask before every draft."""
        panels = {name: linear.panels for name, linear in self._linears.items()}
        embed = self._target.embed
        if not panels or None in panels.values() or embed is None or embed.dtype != torch.float32:
            return None
        key = *self._head_key(), embed.data_ptr()
        if self._trees is None or self._trees[0] != key:
            if self.head is None:
                panels["head"] = head = native.Panels(self._packed_dtype)
                head.load(self.target_rows())
            c = self.config
            heads = c.num_heads, c.num_kv_heads, c.head_dim
            norms = [getattr(self, name) for name in ("norm_in", "norm_h", "norm_post", "norm")]
            ids_V = self.ids_V if c.reduced else None
            trees = native.DraftTrees(panels, embed, norms, heads, c.rms_norm_eps, ids_V)
            self._trees = key, trees
        return self._trees[1]

    @property
    def turns(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the reserved positions, [positions, D] each."""
        assert self._cos_sin is not None, "reserve_positions() first"
        return self._cos_sin

    def reserve_positions(self, num_positions: int) -> None:
        """Makes room in the rope table; grows by doubling."""
        device, cos = self.fc.device, self._cos_sin[0] if self._cos_sin else None
        if cos is not None and cos.device == device and cos.shape[0] >= num_positions:
            return
        size = max(256, 1 << (num_positions - 1).bit_length())
        angle = torch.arange(size, dtype=torch.float32)[:, None] * self._inv_freq
        cos, sin = angle.cos() * self._rope_scale, angle.sin() * self._rope_scale
        # rotate_half(x) = [-x2, x1] is a roll by half with the sign moved into the table.
        table = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        self._cos_sin = table[0].to(device, self.fc.dtype), table[1].to(device, self.fc.dtype)

    def _rotate(self, x_NQD: Tensor, positions_N: Tensor) -> Tensor:
        cos_N1D, sin_N1D = (table[positions_N][..., None, :] for table in self.turns)
        return torch.addcmul(x_NQD * cos_N1D, x_NQD.roll(self.config.head_dim // 2, -1), sin_N1D)

    def _norm(self, x_NH: Tensor, name: str) -> Tensor:
        # A CPU takes `rms_norm` apart into some ten operations; these are four. A draft's bits may
        # depend on its company (those of `hypot` do): no token does.
        if self._packed:
            size_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True)
            return x_NH / torch.hypot(size_N1, self._packed["floor"]) * self._packed[name]
        return F.rms_norm(x_NH, x_NH.shape[-1:], getattr(self, name), self.config.rms_norm_eps)

    def _mm(self, name: str, x: Tensor) -> Tensor:
        if name in self._linears:
            return self._linears[name](x)
        weight = self.target_rows() if name == "head" and self.head is None else getattr(self, name)
        # Under autocast the product is narrow; norms, residuals and attention stay as they are.
        return F.linear(x, weight.to(x.dtype)).to(x.dtype)


def _rope_frequencies(config: Eagle3Config) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] and the factor on cos and sin, from transformers' own rules."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = llama_config(config) | {"hidden_size": config.num_heads * config.head_dim}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes))
    return rotary.inv_freq.float().cpu(), float(rotary.attention_scaling)


def _attend_documents(
    q_MQD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    later: list[tuple[Tensor, Tensor]],
    documents: list[tuple[int, int]],
) -> Tensor:
    """[M, heads, D]: attention of each document's queries to its own keys (see `unroll`)."""
    out, first, query = [], 0, 0
    with torch.autocast(q_MQD.device.type, enabled=False):
        for num_pairs, num_queries in documents:
            keys, at = slice(first, first + num_pairs), slice(query, query + num_queries)
            own = [(k[at], v[at]) for k, v in later]
            out.append(_attend_document(q_MQD[at], k_NKD[keys], v_NKD[keys], own))
            first, query = keys.stop, at.stop
    return torch.cat(out)


def _attend_document(
    q_MQD: Tensor, k_NKD: Tensor, v_NKD: Tensor, later: list[tuple[Tensor, Tensor]]
) -> Tensor:
    (m, heads, dim), (n, kv, _) = q_MQD.shape, k_NKD.shape
    q_KGMD = q_MQD.view(m, kv, heads // kv, dim).permute(1, 2, 0, 3)
    k_KND, v_KND = k_NKD.transpose(0, 1), v_NKD.transpose(0, 1)
    scores = torch.matmul(q_KGMD, k_KND[:, None].transpose(-1, -2))
    place_M1 = torch.arange(n - m, n, device=q_MQD.device)[:, None]
    scores = scores.masked_fill(torch.arange(n, device=q_MQD.device) > place_M1, float("-inf"))
    own = [k.transpose(0, 1)[:, None] for k, _ in later]
    scores = torch.cat([scores] + [(q_KGMD * k).sum(-1, keepdim=True) for k in own], -1)
    weights = torch.softmax(scores * dim**-0.5, -1)
    out = torch.matmul(weights[..., :n], v_KND[:, None])
    for i, (_, v) in enumerate(later):
        out = out + weights[..., n + i : n + i + 1] * v.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(m, heads, dim)


def start_from_target(drafter: Eagle3Drafter, named: Mapping[str, Tensor]) -> None:
    """The cold start: copies what the target already knows. `named`: its full tensors by name.

    fc starts as a copy of the high tap, the MLP and its norm as the target's last layer, the final
    norm and the own head (the tied target's rows) as the target's. The attention stays random.
    Raises ValueError where the target has no Llama-type MLP of the drafter's size.
    """
    c = drafter.config
    last = f"model.layers.{c.num_target_layers - 1}"
    names = [f"{last}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names += [f"{last}.post_attention_layernorm.weight", "model.norm.weight"]
    missing = [name for name in names if name not in named]
    if missing:
        raise ValueError(f"cannot start the drafter from this target: no {', '.join(missing)}")
    gate, up, down, norm_post, norm = (named[name].detach() for name in names)
    if gate.shape[0] != c.intermediate_size:
        raise ValueError(f"the target's MLP is {gate.shape[0]} wide, not {c.intermediate_size}")
    with torch.no_grad():
        drafter.fc.zero_()
        drafter.fc[:, 2 * c.hidden_size :].fill_diagonal_(1.0)
        drafter.gate_up.copy_(torch.cat([gate, up]))
        drafter.down.copy_(down)
        drafter.norm_post.copy_(norm_post)
        drafter.norm.copy_(norm)
        if drafter.head is not None:
            drafter.head.copy_(drafter.target_rows())


def save_drafter(folder: str | Path, drafter: Eagle3Drafter, *, small: bool = False) -> Path:
    """Writes `folder`/drafter.safetensors (weights, draft vocabulary, sizes), atomically.

    small: matrices in int8 with one scale per row, a quarter of the bytes.
    """
    path, tensors = Path(folder) / FILE, dict(drafter.state_dict())
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in [name for name, tensor in tensors.items() if small and tensor.dim() == 2]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        tensors |= {name: (weight / scale).round().to(torch.int8), name + _SCALE: scale}
    return write_atomically(
        path, lambda beside: write_tensors(beside, tensors, file_header(drafter.config))
    )


def file_header(config: Eagle3Config) -> dict[str, str]:
    """What a file of a drafter says beside its tensors, so that it can be loaded alone."""
    return {_SIZES: json.dumps(asdict(config))}


def load_drafter(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Eagle3Drafter:
    """The drafter that `save_drafter` or a checkpoint wrote, not yet tied. ValueError for any
    other file."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {FILE}")
    tensors, header = read_tensors(path)
    with reading(path):
        for name in [name for name in tensors if name.endswith(_SCALE)]:
            plain = name.removesuffix(_SCALE)
            tensors[plain] = tensors[plain] * tensors.pop(name)
        sizes = json.loads(header[_SIZES])
        config = Eagle3Config(**{**sizes, "tap_layers": tuple(sizes["tap_layers"])})
        drafter = Eagle3Drafter(config, dtype=dtype or tensors["fc"].dtype, device=device)
        drafter.load_state_dict(tensors)
    return drafter
