# Position j teaches if x_j is a response token that the target has read; its pair is j - 1 - step.
def supervised(prompt_len, num_tokens, step):
    first = max(prompt_len, step + 1)
    return [(j - 1 - step, j) for j in range(first, num_tokens - 1)]
