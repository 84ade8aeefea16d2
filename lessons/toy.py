"""A language model small enough for the lessons: 129,072 weights that tell very short stories.

The language. A prompt is `tell 3:`, an answer counts sentences down and ends with a newline:

    tell 3:3 a red fox ran. 2 the old queen saw a lamp. 1 my uncle slept.

The first letters of a word are a choice, the others follow from it, and the number in the prompt
decides the length: uncertain and certain tokens alternate as in real text, and lengths have a tail.
One character is one token. The weights lie beside this file, so no lesson waits for training;
`python lessons/toy.py` makes them again (800 steps, a few minutes on one thread).

Left out: everything that would make it a good language model.
"""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS = Path(__file__).with_name("toy.safetensors")
PAD, START, STOP = 0, 1, 2  # STOP is the newline; START exists because some libraries ask for one
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.:"
WHO, HOW, DID, ACTED, WHAT, WHOSE = (
    words.split()
    for words in (
        "fox cat hen dog wolf queen king uncle teacher sailor baker doctor robot child giant",
        "red old young clever hungry sleepy silver gentle strange proud",
        "ran slept laughed waited jumped danced shouted vanished",
        "saw found lost painted carried followed wanted remembered",
        "lamp door apple river letter mirror garden window basket bridge candle blanket",
        "the a my her",
    )
)


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(c) + STOP for c in text]


def decode(tokens: list[int]) -> str:
    return "".join(CHARACTERS[t - STOP] for t in tokens if t >= STOP)


def prompt(num_sentences: int) -> list[int]:
    """`tell 3:` as tokens; the number goes from 1 to 9."""
    return encode(f"tell {num_sentences}:")


def story(num_sentences: int, choose: random.Random) -> str:
    parts = []
    for left in range(num_sentences, 0, -1):
        how = choose.choice(HOW) + " " if choose.random() < 0.5 else ""
        text = f"{left} {choose.choice(WHOSE)} {how}{choose.choice(WHO)} "
        if choose.random() < 0.5:
            text += choose.choice(DID)
        else:
            text += f"{choose.choice(ACTED)} {choose.choice(WHOSE)} {choose.choice(WHAT)}"
        parts.append(text + ".")
    return " ".join(parts) + "\n"


def tail_of_prompts(num_rows: int, seed: int = 0) -> list[list[int]]:
    """Prompts whose stories have a long tail: most ask for 1 to 3 sentences, few for up to 9."""
    choose = random.Random(seed)
    return [prompt(min(9, max(1, round(choose.lognormvariate(0.6, 0.7))))) for _ in range(num_rows)]


def config(**changes: int) -> LlamaConfig:
    sizes = {
        "vocab_size": len(CHARACTERS) + STOP,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": START,
        "eos_token_id": STOP,
        "pad_token_id": PAD,
    }
    return LlamaConfig(**(sizes | changes))


def new_model(settings: LlamaConfig, seed: int = 0, std: float = 0.02) -> LlamaForCausalLM:
    """A model with random weights that leaves torch's global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, std, generator=generator)
    return model.eval()


def load_model() -> LlamaForCausalLM:
    """The trained storyteller, fp32."""
    model = new_model(config())
    model.load_state_dict({name: t.float() for name, t in load_file(WEIGHTS).items()})
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """The same characters as `encode`, as the kind of tokenizer that TRL asks for."""
    byte_level = {"\n": "\u010a", " ": "\u0120"}  # how byte-level tokenizers write these two
    names = ["<pad>", "<start>", *(byte_level.get(c, c) for c in CHARACTERS)]
    vocab = {name: i for i, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": names[STOP]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def train(num_steps: int = 800, batch: int = 72, seed: int = 0) -> LlamaForCausalLM:
    """Next-token prediction on fresh stories, `batch` sentences a step, all rows equally long.

    Prints the loss in nats per token.
    """
    choose, model = random.Random(seed), new_model(config(), seed, std=0.08).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (step + 1) / 50, (num_steps - step) / (0.7 * num_steps))
        n = choose.randint(1, 9)
        rows = [torch.tensor(prompt(n) + encode(story(n, choose))) for _ in range(batch // n)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    return model.eval()


if __name__ == "__main__":
    torch.set_num_threads(1)
    tensors = {n: p.detach().bfloat16().contiguous() for n, p in train().named_parameters()}
    save_file(tensors, WEIGHTS)
    print(f"wrote {WEIGHTS}, {WEIGHTS.stat().st_size / 1e3:.0f} kB")
