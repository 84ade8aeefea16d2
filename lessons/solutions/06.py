# Ranks without steps are left out of the sum: zero times NaN would still be NaN.
def merge(drafters, steps):
    total = sum(steps)
    if not total:
        return drafters[0]
    parts = [(d, n / total) for d, n in zip(drafters, steps, strict=True) if n]
    return {name: sum(weight * d[name] for d, weight in parts) for name in drafters[0]}
