"""Rewards: judges of images behind one protocol. One file each; `registry.py` builds them by name.

    from eval.rewards.registry import build
    with closing(build({"reward": "ocr", "engine": "local"})) as reward:
        reward.check()                                # refuses to go on when it is broken
        verdicts = reward.score(images, rows)

Nothing is imported here: a judge costs what it needs, when it is built.
"""
