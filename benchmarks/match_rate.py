"""How often speculation emits the very tokens of plain decoding, by dtype and shape of the draft.

    python benchmarks/match_rate.py [--drafter DIR] [--new 256] [--rows 16] [--out FILE]

The verification is exact for the logits it is given; the question is whether a row's logits have
the same bits in a chain or a tree as alone. On a CPU with native code they do by construction, in
either dtype: 0 differences are expected. Without it (MINITLT_NATIVE=0) they do in a chain in fp32
(packed products, grouped attention, padding to four rows). In a tree an ancestor's key stands in
another place of the cache, so that attention adds in another order; in bf16 products may differ
with their number of rows as well. Where two tokens nearly tie, a last bit decides, and from there
on the two texts are different samples of the same law.

For every dtype that this processor can pack and every arm: rows that are equal, tokens that were
compared before the first difference of their row, and differences per 1,000 of those tokens.
bf16 is skipped, with a line that says so, where it cannot be packed. The last line is one JSON
object. On a GPU, where nothing but the law is promised, it tells how far that is from equality.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from _machine import RUNS, device
from _machine import parser as options_of

ARMS = ["eagle-1", "eagle-3", "eagle-7", "eagle-2x2b3", "eagle-3x2b7", "eagle-4x3b7"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of this script; whatever else a Bench wants to know is as in rollout.py."""
    parser = options_of(__file__, __doc__, "--rows 4 --new 64")
    parser.add_argument("--drafter", default="smollm2", help="a saved drafter, e.g. RUN/drafter")
    parser.add_argument("--new", type=int, default=256, help="tokens per row at most")
    parser.add_argument("--rows", type=int, default=16, help="decoded together")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--out", type=Path, help="default: a file in runs/")
    own = vars(parser.parse_args(argv))
    from rollout import parse as rollout_options

    fixed = {"arms": ["off", *ARMS], "dtype": "fp32"}
    return argparse.Namespace(**vars(rollout_options([])) | own | fixed)


if __name__ == "__main__":
    parse()  # before torch is loaded: --help is quick, and so is word of what is wrong

import torch  # noqa: E402
from rollout import DTYPES, Bench, keys, machine  # noqa: E402

from minitlt.linear import Linear  # noqa: E402


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.device = options.device or device()
    torch.set_num_threads(options.threads)
    result = machine(options) | {"rows": options.rows, "match_rate": {}}
    for name, dtype in DTYPES.items():
        if options.device == "cpu" and not Linear(dtype, torch.device("cpu")).packs:
            print(f"{name}: skipped, this processor cannot pack {name} weights", flush=True)
            continue
        options.dtype = name
        result["match_rate"][name] = study(Bench(options), options.rows)
    out: Path = options.out or RUNS / "match_rate.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 0


def study(bench: Bench, rows: int) -> dict[str, Any]:
    from minitlt.spec import Arm, Bandit

    plain, spec = bench.engines(bench.options.dtype)
    prompts, params = bench.prompts[:rows], bench.sampling(bench.options.new)
    want = plain.generate(prompts, params, keys(rows, 70)).completion_ids
    result = {}
    for arm in ARMS:
        spec.bandit = Bandit([Arm.parse(arm)])
        rollout = spec.generate(prompts, params, keys(rows, 70))
        result[arm] = compare(want, rollout.completion_ids)
        result[arm]["accept_length"] = round(rollout.stats.accept_length, 3)
        print(f"{bench.options.dtype} {arm:12}", result[arm], flush=True)
    return result


def compare(want: list[list[int]], got: list[list[int]]) -> dict[str, float]:
    """Rows without a difference, and tokens up to the first difference of each row."""
    tokens = equal = 0
    for one, two in zip(want, got, strict=True):
        pairs = zip(one, two, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))
        equal += one == two
        tokens += first + (one != two)
    different = len(want) - equal
    return {
        "rows_equal": equal,
        "rows": len(want),
        "tokens_compared": tokens,
        "differences_per_1000": round(1000 * different / tokens, 3),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
