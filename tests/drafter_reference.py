"""EAGLE-3 written out a second time, slowly: one pair at a time, no packing, no cache, no tables.

Tests compare the library with this file. `Reference` shares no code with it and reads weights by
name; behind it, small random drafters and rows to compare on.

Shape suffixes: H hidden, D head dim, F = 3H taps.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter, Pack

H, W = 19, 61  # a prime hidden size and vocabulary: no width can pass for another
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def norm(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return x_H / torch.sqrt((x_H * x_H).mean() + eps) * weight_H


def rotate(x_D: Tensor, position: int, inv_freq: Tensor, scale: float) -> Tensor:
    half = len(x_D) // 2
    out = torch.empty_like(x_D)
    for i in range(half):
        angle = position * float(inv_freq[i])
        c, s = math.cos(angle) * scale, math.sin(angle) * scale
        out[i] = x_D[i] * c - x_D[i + half] * s
        out[i + half] = x_D[i + half] * c + x_D[i] * s
    return out


class Reference:
    """weights: a drafter's state dict, and `embed` and `lm_head` rows of its draft vocabulary."""

    def __init__(self, drafter, embed_WH: Tensor, rows_VH: Tensor) -> None:
        self.c, self.w = drafter.config, {k: v.detach() for k, v in drafter.state_dict().items()}
        self.embed, self.rows = embed_WH.detach(), rows_VH.detach()
        self.inv_freq, self.scale = drafter._inv_freq, drafter._rope_scale

    def feature(self, taps_F: Tensor) -> Tensor:
        return self.w["fc"] @ taps_F

    def inputs(self, token: int, h_H: Tensor, position: int):
        """Queries [heads, D], keys and values [kv heads, D] of one pair."""
        c, eps = self.c, self.c.rms_norm_eps
        x = torch.cat(
            [norm(self.embed[token], self.w["norm_in"], eps), norm(h_H, self.w["norm_h"], eps)]
        )
        q, k, v = (self.w["qkv"] @ x).split(
            [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        )
        q, k, v = (t.view(-1, c.head_dim) for t in (q, k, v))
        turn = lambda t: torch.stack([rotate(r, position, self.inv_freq, self.scale) for r in t])  # noqa: E731
        return turn(q), turn(k), v

    def layer(self, h_H: Tensor, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The rest of the layer for one pair that sees these keys and values (its own included)."""
        c, heads = self.c, []
        for i in range(c.num_heads):
            g = i // (c.num_heads // c.num_kv_heads)
            scores = torch.stack([q[i] @ k[g] for k in keys]) / math.sqrt(c.head_dim)
            weights = torch.softmax(scores, 0)
            heads.append(sum(w * v[g] for w, v in zip(weights, values, strict=True)))
        h_H = h_H + self.w["out"] @ torch.cat(heads)
        x = norm(h_H, self.w["norm_post"], c.rms_norm_eps)
        gate, up = (self.w["gate_up"] @ x).chunk(2)
        return h_H + self.w["down"] @ (gate / (1 + torch.exp(-gate)) * up)

    def logits(self, h_H: Tensor) -> Tensor:
        head = self.w.get("head", self.rows)
        return head @ norm(h_H, self.w["norm"], self.c.rms_norm_eps)

    def run(self, tokens: list[int], taps_NF: Tensor, drafts: list[int]) -> list[Tensor]:
        """Logits after the row's last pair, then after each drafted token: plain decoding.

        tokens: the row, x_0..x_{L-1}; taps of positions 0..L-2.
        """
        keys, values, h = [], [], None
        for t in range(len(tokens) - 1):
            h_in = self.feature(taps_NF[t])
            q, k, v = self.inputs(tokens[t + 1], h_in, t)
            keys.append(k)
            values.append(v)
        h = self.layer(h_in, q, keys, values)
        out = [self.logits(h)]
        for i, token in enumerate(drafts):
            q, k, v = self.inputs(token, h, len(tokens) - 1 + i)
            keys.append(k)
            values.append(v)
            h = self.layer(h, q, keys, values)
            out.append(self.logits(h))
        return out

    def unroll(self, tokens: list[int], taps_NF: Tensor, steps: int) -> list[list[Tensor]]:
        """Logits [step][pair] of the training-time test over a whole row, true tokens throughout.

        Pair t at step s holds tokens[t + 1 + s]; only pairs for which that token exists are there.
        """
        n = len(tokens) - 1
        first = [self.inputs(tokens[t + 1], self.feature(taps_NF[t]), t) for t in range(n)]
        states = [
            self.layer(
                self.feature(taps_NF[t]),
                first[t][0],
                [k for _, k, _ in first[: t + 1]],
                [v for _, _, v in first[: t + 1]],
            )
            for t in range(n)
        ]
        extra: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n)]
        out = [[self.logits(h) for h in states]]
        for s in range(1, steps):
            for t in range(n - s):
                q, k, v = self.inputs(tokens[t + 1 + s], states[t], t + s)
                extra[t].append((k, v))
                keys = [k0 for _, k0, _ in first[: t + 1]] + [k1 for k1, _ in extra[t]]
                values = [v0 for _, _, v0 in first[: t + 1]] + [v1 for _, v1 in extra[t]]
                states[t] = self.layer(states[t], q, keys, values)
            out.append([self.logits(states[t]) for t in range(n - s)])
        return out


def target_config(**changes):
    values = {
        "hidden_size": H,
        "intermediate_size": 29,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": W,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return SimpleNamespace(**{**values, **changes})


def make_drafter(vocab=0, dtype=torch.float64, seed=0, train_head=True, **changes):
    """A drafter with sizeable random weights, tied to a random embedding and head."""
    config = Eagle3Config.from_target(
        target_config(**changes), DrafterConfig(draft_vocab_size=vocab, train_head=train_head)
    )
    drafter = Eagle3Drafter(config, dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(noise * 0.3 if parameter.dim() == 2 else 1 + 0.3 * noise)
        if vocab:
            drafter.ids_V.copy_(torch.randperm(W, generator=random)[:vocab].sort().values)
    shape = (2, W, config.hidden_size)
    embed, head = torch.randn(shape, generator=random, dtype=torch.float64)
    drafter.tie(embed.to(dtype), head.to(dtype))
    return drafter


def reference(drafter):
    return Reference(drafter, drafter._target.embed, drafter.target_rows())


def random_row(length, seed):
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(W, (length,), generator=random).tolist()
    return tokens, torch.randn(length, 3 * H, generator=random, dtype=torch.float64)


def whole_rows(rows, steps):
    """A pack with every pair of every row as a query; tokens behind a row's end are 0."""
    tokens = [torch.tensor(t) for t, _ in rows]
    taps = [f[: len(t) - 1] for t, f in rows]
    later = [
        torch.stack([torch.nn.functional.pad(t[1 + s :], (0, s)) for s in range(steps)])
        for t in tokens
    ]
    sizes = [len(t) - 1 for t in tokens]
    return Pack(
        torch.cat(taps),
        torch.cat([t[1:] for t in tokens]),
        torch.cat([torch.arange(n) for n in sizes]),
        torch.arange(sum(sizes)),
        torch.cat(later, 1),
        [(n, n) for n in sizes],
    )
