"""The gateway: several engines as one backend (gateway.py). replica_set.py resolves, checks and chooses replicas
(routing.py), replica.py streams from one, fim_template.py writes fill-in-the-middle prompts as text for engines that
take no suffix. Independent of torch.
"""
