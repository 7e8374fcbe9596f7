"""What SAC and TD3 share: an actor, an ensemble of critics, one-step transitions from replay.

config.py   options both have           spaces.py   what observations and actions they take
update.py   the critics' step           agent.py    acting, replay, optimisers, save and load
"""
