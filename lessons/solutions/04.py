# Tokens per second of every depth; max() keeps the first of equals, which is the smallest depth.
def best_depth(skill, pass_seconds, draft_seconds):
    def rate(depth):
        tokens = sum(skill**i for i in range(depth + 1))
        return tokens / (pass_seconds[depth] + depth * draft_seconds)

    return max(range(len(pass_seconds)), key=rate)
