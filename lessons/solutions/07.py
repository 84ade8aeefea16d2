import torch


# Every answer against its own siblings.
def advantages(rewards, group):
    rewards_PG = torch.tensor(rewards).view(-1, group)
    centred = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return (centred / (rewards_PG.std(1, keepdim=True) + 1e-4)).flatten()
