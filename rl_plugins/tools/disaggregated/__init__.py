"""Rollouts on machines of several kinds, as in RollArt: group queue, simulator, router and reward service.

Nothing here changes what is learned. Source: arXiv 2512.22560; the queue also alibaba/ROLL, commit 8eb27cc2,
`roll/distributed/scheduler/rollout_scheduler.py`.
"""
