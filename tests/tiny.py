"""A tiny model folder with a byte-level tokenizer, as a user's own model would look on disk."""

from pathlib import Path

from models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """<pad> 0, <bos> 1, <eos> 2, then printable ASCII; 98 ids at most."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "\u010a": 3}
    for code in range(33, 127):
        vocab.setdefault(chr(code), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=512,
    )
    fast.chat_template = TEMPLATE
    return fast


def save_tiny_model(folder: Path, kind: str = "llama", **sizes: object) -> Path:
    model = tiny_model(kind, **{"vocab_size": 100, "num_hidden_layers": 4, **sizes})
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
