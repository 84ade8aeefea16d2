# A rank's end is a sum over passes; idle is what is missing to the last end.
def idle_share(lengths_by_rank, pass_seconds):
    ends = []
    for lengths in lengths_by_rank:
        active = [sum(length > k for length in lengths) for k in range(max(lengths))]
        ends.append(sum(map(pass_seconds, active)))
    return sum(max(ends) - end for end in ends) / (max(ends) * len(ends))
