"""A queue between an actor and a learner in plain torch, without a job or a manifest, with any number of actors.

asyncflow queue serve &
python actor_learner.py actor tcp://127.0.0.1:5571 &
python actor_learner.py learner tcp://127.0.0.1:5571
"""

import sys

import torch

import asyncflow

ARMS = 4


def act(address: str) -> None:
    """Pull a random arm in each state. The number of the right arm has the signs of the state's entries as its bits."""
    with asyncflow.init_engines(address) as engines:
        for data, index in engines.create_stream_data_loader("actor", ["state"], 32):
            action = torch.randint(ARMS, (len(data["state"]),))
            right = (data["state"] > 0).long() @ torch.tensor([1, 2])
            engines.put_experience_data({"action": action, "reward": (action == right).float()}, index)


def learn(address: str) -> float:
    """Learn the expected reward of each arm; return the share of states whose best arm is the right one."""
    torch.manual_seed(0)
    value = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, ARMS))
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-2)
    with asyncflow.init_engines(address) as engines:
        engines.put_prompts_data({"state": torch.randn(4096, 2)}, last=True)
        while rows := engines.get_experience_data("learner", ["state", "action", "reward"], 64):
            data = rows.data
            expected = value(data["state"]).gather(1, data["action"][:, None])[:, 0]
            loss = (expected - data["reward"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            engines.put_experience_data({}, rows.index)  # done with these
    states = torch.randn(1000, 2)
    return float((value(states).argmax(1) == (states > 0).long() @ torch.tensor([1, 2])).float().mean())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["actor", address]:
            act(address)
        case ["learner", address]:
            print(learn(address))
        case _:
            sys.exit(__doc__)
