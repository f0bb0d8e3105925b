"""What a run will take, reckoned before anything is spent: parameters, bytes, steps, FLOPs, hours, memory.

inputs.py      the target's sizes, the drafter's shape, the data: counted, or as plan.* says
answers.py     what the target's own answers take
work.py        how much arithmetic there is in it
footprint.py   bytes of one micro-batch
profiles.py    bytes of the state under every launch profile
sections.py    all of it as text
"""
