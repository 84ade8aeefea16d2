import torch

from minitlt.kernels import gumbel_noise


# Write the target's own token at every row reached; go on only while it is the draft.
def verify_chain(logits_TV, drafts, key, position, temperature):
    written = []
    for i, logits in enumerate(logits_TV):
        score = logits
        if temperature > 0:
            keys, at = torch.tensor([key]), torch.tensor([position + i])
            score = logits / temperature + gumbel_noise(keys, at, torch.arange(len(logits)))[0]
        written.append(int(score.argmax()))
        if i == len(drafts) or written[-1] != drafts[i]:
            break
    return written
