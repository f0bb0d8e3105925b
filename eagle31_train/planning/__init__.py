"""What a run will take before anything is spent: parameters, bytes, steps, FLOPs, hours, memory.

inputs.py      the target's sizes and the data: counted, or as plan.* says
work.py        how much arithmetic the data hold
footprint.py   bytes of one micro-batch, and of the state under every launch profile
planned.py     the numbers that follow from these together
sections.py    all of it as text
"""
